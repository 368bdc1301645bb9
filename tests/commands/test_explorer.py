"""The flow explorer: its script's formulas are the library's, and its page runs in a browser."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.commands.browser import CHROMIUM, NODE, dom, evaluated
from tests.commands.flats import invoke

import measureflow as mf
from measureflow import theory
from measureflow.commands.explorer.page import page
from measureflow.flows.birth_death import births_and_deaths

pytestmark = pytest.mark.xdist_group("commands")
needs_a_script = pytest.mark.skipif(
    NODE is None and CHROMIUM is None, reason="there is neither node nor chromium on this machine"
)
WELLS = [[-0.4]]
MODES = [[3.0, 3.0], [3.0, -3.0], [-3.0, 3.0], [-3.0, -3.0], [0.5, 5.0]]
LENGTHSCALE, BANDWIDTH = 0.7, 0.4


def statement(toy, kl, mmd, added=False):
    """What the page knows of a problem."""
    centres = {"line": WELLS if added else [], "plane": MODES if added else MODES[:4]}[toy]
    return {"toy": toy, "centres": centres, "kl": kl, "mmd": mmd, "lengthscale": LENGTHSCALE}


def wells(theta):
    dips = 3 * jnp.exp(-jnp.square(theta[0] - jnp.asarray(WELLS)[:, 0]) / (2 * 0.35**2))
    return theory.quartic_loss(theta) - jnp.sum(dips)


def modes(theta):
    squares = jnp.sum(jnp.square(theta[None] - jnp.asarray(MODES)), axis=1)
    return jnp.log(2 * jnp.pi * len(MODES)) - jax.nn.logsumexp(-squares / 2)


def problem_of(statement):
    """The same as a problem of the library."""
    line, added = statement["toy"] == "line", statement["centres"] in (WELLS, MODES)
    plain, changed = (theory.quartic_loss, wells) if line else (theory.four_modes_loss, modes)
    reference = mf.Gaussian(jnp.zeros(1), 1.0) if line else mf.Flat()
    kernel = mf.SquaredExponential(statement["lengthscale"])
    terms = []
    if statement["mmd"]:
        terms.append(statement["mmd"] * mf.SquaredMMD(reference, kernel))
    if statement["kl"]:
        terms.append(statement["kl"] * mf.KL(reference))
    regulariser = None
    for term in terms:
        regulariser = term if regulariser is None else regulariser + term
    return mf.Problem(changed if added else plain, regulariser)


STATEMENTS = {
    "DE": statement("line", 0, 0),
    "DLE": statement("line", 1.0, 0),
    "DRE": statement("line", 0, 0.8, added=True),
    "DRLE": statement("line", 0.7, 0.5),
    "DRLE in the plane": statement("plane", 0.2, 0.3, added=True),
}
ESTIMATES = ("KernelDensity", "Blob", "SteinGradientEstimator")
FLOWS = ("WassersteinFlow", *ESTIMATES, "SteinFlow")


def flows_of_the_library():
    kernel = mf.SquaredExponential(BANDWIDTH)
    estimates = {name: mf.WassersteinFlow(1.0, entropy=getattr(mf, name)(kernel)) for name in ESTIMATES}
    return {"WassersteinFlow": mf.WassersteinFlow(1.0), **estimates, "SteinFlow": mf.SteinFlow(kernel, 1.0)}


def particles(toy, n=90):
    return np.random.default_rng(3).normal(size=(n, 1 if toy == "line" else 2))


@pytest.fixture(scope="module")
def script():
    """Everything that the tests ask of the script, in one run of it."""
    asked = {
        name: {"problem": given, "x": particles(given["toy"]).reshape(-1).tolist()}
        for name, given in STATEMENTS.items()
    }
    return evaluated(
        f"""
        const asked = {json.dumps(asked)}, found = {{}};
        for (const [name, {{problem, x: given}}] of Object.entries(asked)) {{
          const x = Float64Array.from(given), J = flows.toys[problem.toy].J, of = {{}};
          for (const flow of {json.dumps(FLOWS)})
            of[flow] = [...flows.direction(problem, {{name: flow, bandwidth: {BANDWIDTH}}}, x)];
          const m = [0.3, -0.4].slice(0, J), s = [0.8, 1.3].slice(0, J);
          const g = flows.gaussianValue(problem, m, s);
          const q = flows.Minimiser(problem).advance(20000);
          found[name] = {{
            drift: [...flows.drift(problem, x)], flows: of, value: flows.value(problem, x),
            gaussian: [g.value, ...g.ofMean, ...g.ofLog],
            excess: problem.kl ? [...flows.excess(problem, x)] : null,
            minimiser: [...q.mass].map(m => m / q.cell), least: q.value, done: q.done, axis: q.axis,
            limit: flows.theorem1(problem, 0.5),
          }};
        }}
        const ends = {{}};
        for (const [name, n, steps] of [['DE', 400, 1500], ['DLE', 400, 600], ['DRLE', 400, 600]]) {{
          const state = flows.begin(asked[name].problem, n, 7);
          for (let i = 0; i < steps; i++) flows.step(asked[name].problem, {{name: 'WassersteinFlow'}}, state);
          ends[name] = [...state.x];
        }}
        const dle = asked.DLE.problem, kinetic = flows.begin(dle, 400, 8, 1.5);
        for (let i = 0; i < 600; i++) flows.step(dle, {{name: 'KineticFlow'}}, kinetic);
        ends.KineticFlow = [...kinetic.x];
        const gaussian = flows.begin(asked.DRLE.problem, 10, 1, 0.5);
        for (let i = 0; i < 2000; i++) flows.step(asked.DRLE.problem, {{name: 'ParametricFlow'}}, gaussian);
        const end = flows.gaussianValue(asked.DRLE.problem, gaussian.mean, gaussian.scale);
        const shares = [0, 0, 0];
        for (let seed = 0; seed < 600; seed++) {{
          const x = Float64Array.of(0, 1, 2), rates = Float64Array.of(1, 0, -1);
          flows.birthsAndDeaths(rates, x, 1, flows.Random(seed));
          x.forEach(who => {{ shares[who] += 1 / 600; }});
        }}
        return {{found, ends, end: [end.value, ...end.ofMean, ...end.ofLog], shares}};
        """
    )


def grid_of(found, toy):
    axis = np.asarray(found["axis"])
    return axis if toy == "line" else np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1)


def close(found, expected):
    """To 1e-5 of the largest number among them."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-5 * largest)


@needs_a_script
@pytest.mark.parametrize("name", STATEMENTS)
def test_the_script_has_the_library_s_drift(name, script):
    given, found = STATEMENTS[name], script["found"][name]
    # The script computes in double precision, and Stein's equation is ill-conditioned.
    with jax.enable_x64(True):
        problem, x = problem_of(given), jnp.asarray(particles(given["toy"]))
        close(found["drift"], problem.wasserstein_gradient(x))
        for flow, library in flows_of_the_library().items():
            # One step of η = 1 is minus the direction. Where there is noise, the drift above is all.
            if flow == "WassersteinFlow" and given["kl"]:
                continue
            moved = library.step(problem, library.init(problem, x), None, jax.random.key(0)).particles
            close(found["flows"][flow], x - moved)


@needs_a_script
@pytest.mark.parametrize("name", STATEMENTS)
def test_the_script_has_the_library_s_value(name, script):
    given, found = STATEMENTS[name], script["found"][name]
    with jax.enable_x64(True):
        problem, x = problem_of(given), jnp.asarray(particles(given["toy"]))
        assert found["value"] == pytest.approx(float(problem.value(mf.Empirical(x))), rel=1e-5)
    size = x.shape[1]
    flat = np.concatenate([[0.3, -0.4][:size], np.log([0.8, 1.3])[:size]])
    # Sums over a grid converge faster than any power of its spacing here.
    grid = grid_of({"axis": np.linspace(-9, 9, 901 if size == 1 else 121)}, given["toy"])

    def at(nu):
        points = grid.reshape(-1, size)
        density = stats.norm.pdf(points, nu[:size], np.exp(nu[size:])).prod(axis=1)
        return theory.value(problem_of(given), grid, density)

    assert found["gaussian"][0] == pytest.approx(at(flat), rel=1e-5)
    # Centred differences, whose error is of the second order.
    slopes = [(at(flat + h) - at(flat - h)) / 2e-3 for h in 1e-3 * np.eye(2 * size)]
    close(found["gaussian"][1:], slopes)


@needs_a_script
@pytest.mark.parametrize("name", [name for name, given in STATEMENTS.items() if given["kl"]])
def test_births_and_deaths_are_the_library_s(name, script):
    given, found = STATEMENTS[name], script["found"][name]
    with jax.enable_x64(True):
        flow, x = mf.BirthDeath(mf.WassersteinFlow(1e-2), 1e-2), jnp.asarray(particles(given["toy"]))
        close(found["excess"], flow._excess(problem_of(given), mf.Empirical(x), None))


@needs_a_script
@pytest.mark.parametrize("name", STATEMENTS)
def test_the_minimiser_is_that_of_the_theory(name, script):
    given, found = STATEMENTS[name], script["found"][name]
    problem, grid = problem_of(given), grid_of(found, given["toy"])
    exact = theory.minimiser(problem, grid)
    density = np.reshape(found["minimiser"], exact.shape)
    assert found["done"]
    assert found["least"] == pytest.approx(theory.value(problem, grid, exact), abs=2e-4)
    assert found["least"] == pytest.approx(theory.value(problem, grid, density), abs=1e-6)
    if given["kl"] or not given["mmd"]:
        cell = (grid[1] - grid[0] if grid.ndim == 1 else grid[1, 0, 0] - grid[0, 0, 0]) ** (
            grid.ndim - 1 or 1
        )
        assert 0.5 * np.abs(density - exact).sum() * cell < 1e-6


@needs_a_script
@pytest.mark.parametrize("name", ["DE", "DRE", "DRLE in the plane"])
def test_theorem_1_s_limit_is_that_of_the_theory(name, script):
    """It depends on ℓ and Q₀ alone, so every problem has one."""
    given, found = STATEMENTS[name], script["found"][name]
    start = jnp.zeros(1 if given["toy"] == "line" else 2).at[0].set(0.5)
    # No point lies on a border between basins that is there by symmetry.
    axis = np.linspace(-5.95, 5.95, 120) if given["toy"] == "line" else np.linspace(-5.85, 5.85, 40)
    loss = problem_of(given).objective.loss
    atoms, weights = theory.deep_ensemble_limit(
        loss, mf.Gaussian(start, 1.0), grid_of({"axis": axis}, given["toy"])
    )
    limit = {tuple(np.round(atom["at"], 2)): atom["mass"] for atom in found["limit"]}
    for atom, weight in zip(atoms, weights, strict=True):
        if weight > 1e-3:
            # Of two grids, each of which gives a cell to one basin or the other.
            assert limit[tuple(np.round(atom, 2))] == pytest.approx(weight, abs=0.02)


@needs_a_script
def test_runs_end_where_the_theory_says(script):
    de = np.asarray(script["ends"]["DE"])
    assert np.minimum(np.abs(de + 2), np.abs(de - 1)).max() < 1e-3, "Theorem 1's atoms"
    assert stats.binomtest(int((de < 0).sum()), len(de), 0.5).pvalue > 1e-3
    for name in ("DLE", "DRLE"):
        found = script["found"][name]
        law = theory.GridLaw(
            np.asarray(found["axis"]), theory.minimiser(problem_of(STATEMENTS[name]), grid_of(found, "line"))
        )
        assert stats.kstest(script["ends"][name], law.mass_below).pvalue > 1e-3
        other = "DLE" if name == "DRLE" else "DE"
        assert stats.kstest(script["ends"][other], law.mass_below).pvalue < 1e-3, "it can tell them apart"


@needs_a_script
def test_other_flows_end_there_too(script):
    axis = np.asarray(script["found"]["DLE"]["axis"])
    law = theory.GridLaw(axis, theory.minimiser(problem_of(STATEMENTS["DLE"]), axis))
    assert stats.kstest(script["ends"]["KineticFlow"], law.mass_below).pvalue > 1e-3
    value, *slopes = script["end"]
    assert np.abs(slopes).max() < 1e-4, "FD-GVI is stationary"
    assert value > script["found"]["DRLE"]["least"] + 0.05, "and no Gaussian is the minimiser"


@needs_a_script
def test_births_and_deaths_happen_as_often(script):
    """Of three particles with rates 1, 0 and −1, as the library has it: by simulation, in standard errors."""
    keys = jax.random.split(jax.random.key(0), 4000)
    sources = jax.vmap(lambda key: births_and_deaths(jnp.asarray([1.0, 0.0, -1.0]), key))(keys)
    counts = np.stack([(np.asarray(sources) == who).sum(axis=1) for who in range(3)], axis=1)
    error = counts.std(axis=0) * np.sqrt(1 / 600 + 1 / 4000)
    assert np.all(np.abs(script["shares"] - counts.mean(axis=0)) < 4 * error)
    assert script["shares"][2] > 1.3 > 1 > script["shares"][0]


# The page.


def test_the_page_is_complete_and_alone():
    text = page()
    assert not re.search(r"https?:|src=|@import|url\(", text), "it fetches something"
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    for words in ("Theorem 1", "Theorem 2", "DRLE", "SteinFlow", "BirthDeath", "Blob", "FD-GVI"):
        assert words in text


def test_the_documentation_has_this_page():
    """`measureflow explore --out docs/assets/explorer.html --force` writes it again."""
    kept = Path(__file__).parents[2] / "docs" / "assets" / "explorer.html"
    assert kept.read_text(encoding="utf-8") == page()


def test_the_command_writes_it_once(tmp_path):
    out = tmp_path / "explorer.html"
    done = invoke("explore", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert out.read_text(encoding="utf-8") == page()
    out.write_text("mine")
    refused = invoke("explore", "--out", out)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert out.read_text() == "mine"
    assert invoke("explore", "--out", tmp_path / "nowhere" / "explorer.html").exit_code == 2
    assert invoke("explore", "--out", out, "--force").exit_code == 0
    assert out.read_text(encoding="utf-8") == page()


PRESSED = """<script>
const press = selector => document.querySelector(selector).click();
const at = (x, y) => {
  const picture = document.getElementById('picture'), box = picture.getBoundingClientRect();
  const place = {clientX: box.left + x * box.width, clientY: box.top + y * box.height};
  picture.dispatchEvent(new MouseEvent('click', place));
};
const started = document.documentElement.dataset.distance;
PRESS
document.documentElement.dataset.started = started;
</script></body>"""


def pressed(tmp_path, script):
    """What the page knows after a reader's clicks and as many pictures as fit into five seconds."""
    path = tmp_path / "explorer.html"
    text = page().replace("</body>", PRESSED.replace("PRESS", script))
    # A browser without a window asks for no pictures: a clock does.
    clock = "<script>window.requestAnimationFrame = draw => setTimeout(draw, 16);</script></head>"
    path.write_text(text.replace("</head>", clock), encoding="utf-8")
    text, console = dom(path, "--virtual-time-budget=5000")
    assert not console, console
    return dict(re.findall(r'data-([a-z]+)="([^"]*)"', re.search(r"<html[^>]*>", text)[0]))


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@needs_chromium
def test_a_browser_follows_a_deep_ensemble_to_theorem_1(tmp_path):
    """The first guided step, as a student takes it."""
    found = pressed(tmp_path, "press('.steps li:nth-child(1) button');")
    assert found["method"] == "DE"
    assert int(found["steps"]) > 500
    assert float(found["started"]) > 0.5
    # A binomial share of 200 particles, half of them at either of two atoms 3 apart: four standard errors.
    assert float(found["distance"]) < 3 * 4 * np.sqrt(0.25 / 200)
    assert float(found["value"]) > float(found["least"]) + 1, "Theorem 1's limit is not the minimiser"


@needs_chromium
def test_a_browser_follows_noise_and_repulsion_to_the_minimiser(tmp_path):
    """From a start far to the right, with more particles and a well added on the way."""
    found = pressed(tmp_path, "press('.steps li:nth-child(4) button'); at(0.1, 0.5);")
    assert (found["method"], found["particles"]) == ("DRLE", "310")
    axis = np.linspace(-5, 4, 361)
    law = theory.GridLaw(axis, theory.minimiser(problem_of(statement("line", 1.0, 1.0)), axis))
    mean, deviation = law.expected_wasserstein_1(np.random.default_rng(0), 310)
    assert float(found["distance"]) < mean + 5 * deviation < float(found["started"])
    assert float(found["value"]) == pytest.approx(float(found["least"]), abs=0.2)


@needs_chromium
def test_a_click_adds_a_mode(tmp_path):
    press = "press('.steps li:nth-child(6) button'); press('#run');"
    found = pressed(tmp_path, f"{press} document.getElementById('adds').value = 'well'; at(0.5, 0.5);")
    assert (found["method"], found["centres"]) == ("DRLE", "5")
