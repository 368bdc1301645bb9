"""Other papers' figures and claims: the laws behind them on small problems, and the page they are on."""

import json
from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, key
from typer.testing import CliRunner
from verification import paper_page

import measureflow as mf
from measureflow import cli
from measureflow.study import beyond
from measureflow.study.beyond import (
    location,
    on_uci,
    predictively_oriented,
    predictively_oriented_uci,
    shifted_splits,
)
from measureflow.study.beyond.mean_field_langevin import _stepped
from measureflow.study.beyond.on_uci import Size
from measureflow.study.beyond.predictively_oriented import Location
from measureflow.study.beyond.second_order_bounds import laplace, objectives
from measureflow.study.paper.claims import Claim, Reproduction
from measureflow.study.tables.records import ResumeError

pytestmark = pytest.mark.standard_promotion


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in beyond.NAMES if name not in beyond.NEED_DATA])
def test_theory_holds(name):
    claims = beyond.reproduce(name, seed=1, quick=True).claims
    assert [claim.claim for claim in claims if claim.kind == "theory" and not claim.holds] == []


def test_data_without_chance_have_exact_moments():
    for variance, cases in ((1.5, 300), (0.3, 12)):
        data = location.quantiles(variance, cases)
        assert data.mean() == pytest.approx(0, abs=1e-12)
        assert data.var() == pytest.approx(variance)


def test_a_posterior_that_collapses_is_no_predictively_oriented_one():
    """The law's claims hold of the variances that a grid has, and not where Bayes is taken for the other."""
    temperatures = np.array(predictively_oriented.TEMPERATURES)
    bayes, predictive, right = 1 / (1 / temperatures + 1 / 1.5**2), 0.5 + 4 * temperatures, temperatures
    found = Location(bayes.tolist(), predictive.tolist(), right.tolist(), 4e-4, {}, np.empty(0))
    assert all(claim.holds for claim in predictively_oriented._law_claims(found))
    mutants = [
        found._replace(predictive=bayes.tolist()),
        found._replace(bayes=predictive.tolist()),
        found._replace(right=predictive.tolist()),
        found._replace(certificate=0.1),
    ]
    for mutant in mutants:
        assert sum(not claim.holds for claim in predictively_oriented._law_claims(mutant)) == 1


def test_second_order_bound_lies_between():
    """On weighted particles: log score ≤ PAC² ≤ expected loss, and strictly where they differ."""
    stated = objectives(*laplace())
    particles = mf.Gaussian(jnp.zeros(1), 1.5).sample(key(0), 9)
    spread = mf.Empirical(particles, jnp.linspace(0.2, 1.8, 9) / 9)
    bayes, second, score = (float(one.value(spread)) for one in stated.values())
    assert score < second - 1e-3 < bayes - 2e-3
    # Of one member all three are the same.
    alone = [float(one.value(mf.Empirical(particles[:1]))) for one in stated.values()]
    assert_close(alone, [alone[0]] * 3, 1e-5)


def test_the_evolution_of_a_density_keeps_its_mass_and_rests_at_gibbs():
    """(I − rate·A) with detailed balance: exp(−slope) is a fixed point to rounding, nothing else is."""
    slope = 3 * np.sin(np.linspace(0, 6, 50)) + np.linspace(0, 2, 50)
    gibbs = np.exp(-slope) / np.exp(-slope).sum()
    assert np.abs(_stepped(gibbs, slope, 7.0) - gibbs).max() < 1e-13
    flat = np.full(50, 1 / 50)
    moved = _stepped(flat, slope, 7.0)
    assert moved.sum() == pytest.approx(1, abs=1e-12)
    assert moved.min() > 0
    assert np.abs(moved - flat).max() > 1e-3
    # One step lowers KL(q, Gibbs).
    assert np.sum(moved * np.log(moved / gibbs)) < np.sum(flat * np.log(flat / gibbs))


LEVEL, WEIGHTS = np.array([0.0, 5.0, 2.0]), predictively_oriented_uci.WEIGHTS


def predicted(held_out, test):
    """A record of one set, of methods with the same scores but for PrO's: held-out and test NLL by weight."""
    same = {f"{w:g}": {"held-out NLL": LEVEL.tolist(), "NLL": LEVEL.tolist()} for w in WEIGHTS}
    scores = {"DLE": same, "half": same, "PrO": dict(same)}
    for weight, one, other in zip(("0.1", "10"), held_out, test, strict=True):
        scores["PrO"][weight] = {"held-out NLL": one, "NLL": other}
    return {"scores": scores}


def test_verdicts_are_paired_by_split():
    """Better by 0.1 on every split, though splits differ by far more: a win; and the other way a loss."""
    by = np.array([0.11, 0.09, 0.1])
    best = (LEVEL - 1).tolist()
    better, worse = (
        predicted([LEVEL.tolist(), best], [LEVEL.tolist(), (LEVEL + sign * by).tolist()]) for sign in (-1, 1)
    )
    claim = predictively_oriented_uci._claims({"yacht": better})[0]
    assert claim.holds
    assert claim.measured == "1 wins, 0 losses of 1"
    assert not predictively_oriented_uci._claims({"yacht": worse})[0].holds
    assert "worse on 1 (yacht)" in predictively_oriented_uci._summary({"yacht": worse})


def test_weights_are_chosen_on_held_out_rows_and_not_on_test_rows():
    """Held-out rows prefer 0.1 on the first split, 10 on the others; test rows the reverse. A run that
    diverged, null in a record, is never chosen."""
    record = predicted([[-9.0, None, 9.0], [9.0, -9.0, -9.0]], [[7.0, -7.0, -7.0], [-8.0, 8.0, 8.0]])
    weights = np.array(WEIGHTS)[predictively_oriented_uci.chosen(record, "PrO")]
    assert weights.tolist() == [0.1, 10.0, 10.0]
    assert predictively_oriented_uci.at_choice(record, "PrO").tolist() == [7.0, 8.0, 8.0]


def test_held_out_rows_are_training_rows():
    train = np.arange(0, 100, 2)
    kept, held_out = predictively_oriented_uci._without_some(train, 0, 3)
    assert len(held_out) == 10
    assert np.array_equal(np.sort(np.concatenate([kept, held_out])), train)
    assert not np.array_equal(predictively_oriented_uci._without_some(train, 0, 4)[1], held_out)


def test_rows_of_weight_one_over_w_give_the_prior_weight_w():
    """So that fits with different weights are one program: only the number of cases differs."""
    inputs, rng = np.random.default_rng(0).normal(size=(60, 2)), np.random.default_rng(1)
    targets = rng.normal(size=60)
    heavy, plain = (
        mf.EnsembleRegressor("DLE", **on_uci.NETWORKS, prior_weight=1.0)._prepare(inputs, targets, weights)
        for weights in (np.full(60, 1 / 3), None)
    )
    assert heavy.table.cases == pytest.approx(plain.table.cases / 3)
    for one, other in zip(heavy.table[:3], plain.table[:3], strict=True):
        assert_close(one, other, 1e-12)
    assert heavy.models[0].steps == plain.models[0].steps


@pytest.fixture
def toy_sets(monkeypatch):
    """No data: what is kept in files, and what goes on from them."""
    nothing = mf.datasets.RegressionSet(np.zeros((2, 1)), np.zeros(2), [])
    monkeypatch.setattr(on_uci, "load_uci", lambda name, progress: nothing)
    computed = []

    def measure(data):
        computed.append(data)
        return {"NLL": [1.0, float("inf")]}

    return measure, computed


def test_records_are_not_computed_again(toy_sets, tmp_path):
    measure, computed = toy_sets
    first = on_uci.records_of(Size(("yacht",), 2), 0, {"members": (5, 40)}, measure, tmp_path)
    both = on_uci.records_of(Size(("yacht", "wine"), 2), 0, {"members": (5, 40)}, measure, tmp_path)
    assert len(computed) == 2, "wine alone was missing"
    assert both["yacht"] == json.loads((tmp_path / "yacht.json").read_text())
    assert both["yacht"]["scores"] == first["yacht"]["scores"] == {"NLL": [1.0, None]}
    told = on_uci.origin(both, Size(("yacht", "wine"), 2))
    assert told["options"] == " --sets yacht,wine --splits 2"
    assert told["seconds"] == pytest.approx(sum(one["seconds"] for one in both.values()))


def test_records_of_other_settings_are_refused(toy_sets, tmp_path):
    measure, computed = toy_sets
    on_uci.records_of(Size(("yacht",), 2), 0, {"members": 5}, measure, tmp_path)
    for size, seed, settings in (
        (Size(("wine", "yacht"), 3), 0, {"members": 5}),
        (Size(("wine", "yacht"), 2), 1, {"members": 5}),
        (Size(("wine", "yacht"), 2), 0, {"members": 6}),
    ):
        with pytest.raises(ResumeError, match=r"yacht.json was run with .*pass another --out, or --force"):
            on_uci.records_of(size, seed, settings, measure, tmp_path)
    (tmp_path / "yacht.json").write_text("{")
    with pytest.raises(ResumeError, match="remove it"):
        on_uci.records_of(Size(("yacht",), 2), 0, {"members": 5}, measure, tmp_path)
    assert len(computed) == 1, "wine was not computed before that was said"


def shifted(better):
    """A record in which DLE is better than DE by so much, by kind of split."""
    spread = np.array([-0.01, 0.0, 0.01])
    return {
        "scores": {
            kind: {
                "DE": {"5": {"NLL": LEVEL.tolist()}, "40": {"NLL": LEVEL.tolist()}},
                "DLE": {"5": {"NLL": LEVEL.tolist()}, "40": {"NLL": (LEVEL - gain + spread).tolist()}},
            }
            for kind, gain in zip(shifted_splits.KINDS, better, strict=True)
        }
    }


def test_claims_under_shift_are_of_many_members():
    """Of 40, by kind of split."""
    holds = shifted_splits._claims({"yacht": shifted((-0.1, 0.1, 0.1))})
    assert [claim.holds for claim in holds] == [True, True]
    assert [claim.holds for claim in shifted_splits._claims({"yacht": shifted((0.1, -0.1, 0.1))})] == [
        False
    ] * 2
    told = shifted_splits._summary({"yacht": shifted((-0.1, 0.1, 0.1))})
    assert "0 against 1 on random splits, 1 against 0 on gap splits, 1 against 0 on tail splits" in told


@pytest.fixture
def made_by_hand(monkeypatch, tmp_path):
    """Every reproduction in no time: what the command and the page make of it is what is tested."""
    asked = []

    def reproduce(name, seed, quick, progress):
        asked.append(name)
        claims = [Claim(f"{name} is right", "theory", 1.0, 1.0, "± 0.1", name != "gradient-discrepancy")]
        return Reproduction(claims, {}, lambda figure: None, tables={"Table: numbers": [{"a": 1}]})

    monkeypatch.setattr(beyond, "reproduce", reproduce)
    monkeypatch.chdir(tmp_path)
    return asked


def test_the_command_and_the_page(made_by_hand, monkeypatch, tmp_path):
    done = CliRunner().invoke(cli.app, ["reproduce", "beyond", "--out", "results", "--quick"])
    assert done.exit_code == 1, "one claim of theory does not hold"
    assert made_by_hand == [name for name in beyond.NAMES if name not in beyond.NEED_DATA]
    monkeypatch.setattr(paper_page, "DOCS", tmp_path)
    (tmp_path / "assets" / "beyond").mkdir(parents=True)
    page = paper_page.beyond_page(tmp_path / "results")
    for name in made_by_hand:
        assert f"## {beyond.NAMES[name]}" in page
        assert f"`measureflow reproduce {name} --quick`" in page
        assert (tmp_path / "assets" / "beyond" / f"{name}.png").exists()
        module = import_module(f"measureflow.study.beyond.{name.replace('-', '_')}")
        assert module.__doc__.splitlines()[0] in page, "each section is introduced by its module"
    assert page.count("| **no** |") == 1
    assert "Table: numbers" in page
    assert beyond.NAMES["shifted-splits"] not in page
    record = json.loads((tmp_path / "results" / "mean-field-langevin" / "provenance.json").read_text())
    assert record["name"] == "mean-field-langevin"


def test_a_page_keeps_what_was_not_run_again(made_by_hand, monkeypatch, tmp_path):
    CliRunner().invoke(cli.app, ["reproduce", "mean-field-langevin", "--out", "results"])
    monkeypatch.setattr(paper_page, "DOCS", tmp_path)
    (tmp_path / "assets" / "beyond").mkdir(parents=True)
    kept = f"## {beyond.NAMES['second-order-bounds']}\n\nof an earlier run\n"
    old = f"## {beyond.NAMES['mean-field-langevin']}\n\nwhat is replaced\n"
    last = f"## {beyond.NAMES['shifted-splits']}\n\nthe last of the page\n"
    page = paper_page.beyond_page(tmp_path / "results", f"# Title\n\n{kept}\n{old}\n{last}")
    assert kept in page
    assert page.endswith(last)
    assert "what is replaced" not in page
    assert page.index("of an earlier run") < page.index("mean-field-langevin is right")
    assert paper_page.beyond_page(tmp_path / "results", page) == page


def test_sizes_are_for_what_has_data(made_by_hand):
    done = CliRunner().invoke(cli.app, ["reproduce", "mean-field-langevin", "--splits", "3"])
    assert done.exit_code == 2
    assert "shifted-splits take it" in " ".join(done.output.replace("│", " ").split())
    assert made_by_hand == []


def test_records_survive_the_next_run_and_not_force(toy_sets, monkeypatch, tmp_path):
    measure, computed = toy_sets
    monkeypatch.setattr(
        shifted_splits, "measured", lambda data, size, seed: measure(data) and shifted((1, 1, 1))["scores"]
    )
    asked = ["reproduce", "shifted-splits", "--out", str(tmp_path), "--sets", "yacht", "--splits", "2"]
    assert [CliRunner().invoke(cli.app, asked).exit_code for _ in range(2)] == [0, 0]
    assert len(computed) == 1
    assert CliRunner().invoke(cli.app, [*asked, "--steps", "9"]).exit_code == 2
    assert CliRunner().invoke(cli.app, [*asked, "--steps", "9", "--force"]).exit_code == 0
    assert len(computed) == 2
    record = json.loads((tmp_path / "shifted-splits" / "provenance.json").read_text())
    assert record["options"] == " --sets yacht --splits 2 --steps 9"
    assert record["summary"].startswith("The outcome, with 40 members on yacht")


def test_unknown_names_list_these_too(made_by_hand):
    done = CliRunner().invoke(cli.app, ["reproduce", "mean-field"])
    assert done.exit_code == 2
    assert "mean-field-langevin" in done.output
    assert made_by_hand == []
