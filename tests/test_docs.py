"""The documentation runs: every Python block, in order, and prints what stands below it.

`python tests/test_docs.py` runs the pages and writes outputs and pictures back into them; pages named
as arguments, as in `python tests/test_docs.py docs/tutorial.md`, are run alone.
"""

import contextlib
import inspect
import io
import operator
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from matplotlib import pyplot as plt
from quick import compiled_quickly

import measureflow as mf
from measureflow.tables import ensemble
from measureflow.tables.recipe import FEWEST_STEPS

ROOT = Path(__file__).parent.parent
# These call NumPyro and Flax, which are not written for strict promotion.
LENIENT = (
    "README.md",
    "docs/practitioners.md",
    "docs/researchers.md",
    "docs/posteriors.md",
    "docs/extend.md",
)
PAGES = ("docs/index.md", "docs/tutorial.md", "docs/scaling.md", "docs/faq.md", *LENIENT)
# Minutes each.
LONG = ("docs/practitioners.md", "docs/researchers.md")
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<output>.*?)^```$)?", re.M | re.S)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

# Sums in single precision depend on the machine, by about 1e-6 relative, and a run of thousands of steps
# passes that on. So numbers with a decimal point may differ by a fiftieth, and by one in the last digit
# shown; whole numbers are counts, and may not.
RELATIVE = 0.02


def blocks(page: str) -> list[re.Match]:
    return list(BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")))


def run(page: str, folder: Path, shortened: Callable[[str], str] = str) -> list[str]:
    """What each block of a page prints, all of them in one namespace, pictures going to `folder`."""
    plt.switch_backend("Agg")
    namespace, printed = {"__name__": page}, []
    with contextlib.chdir(folder):
        for block in blocks(page):
            code = compile(shortened(block["code"]), f"{page}, character {block.start()}", "exec")
            # Optax itself relies on promotion: Adam raises a weak float to an integer power.
            promotion = "standard" if "optax" in block["code"] else jax.config.jax_numpy_dtype_promotion
            with contextlib.redirect_stdout(io.StringIO()) as output, jax.numpy_dtype_promotion(promotion):
                exec(code, namespace)
            printed.append(output.getvalue())
    plt.close("all")
    return printed


def agree(shown: str, printed: str) -> bool:
    if NUMBER.split(shown) != NUMBER.split(printed):
        return False
    return all(map(numbers_agree, NUMBER.findall(shown), NUMBER.findall(printed)))


def numbers_agree(shown: str, printed: str) -> bool:
    if "." not in shown:
        return shown == printed
    last_digit = 10.0 ** -len(shown.split(".")[1].split("e")[0])
    return abs(float(shown) - float(printed)) <= RELATIVE * abs(float(shown)) + 1.01 * last_digit


def fewer_steps(code: str) -> str:
    """Thousands, which are steps, divided by fifty."""
    return re.sub(r"\b\d+_\d{3}\b", lambda found: str(int(found[0]) // 50), code)


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*not converged")
@pytest.mark.parametrize("page", LONG)
def test_pages_run_in_few_steps(page, tmp_path, monkeypatch):
    """Of pages that fit much, `make verify` compares the numbers."""
    monkeypatch.setattr(ensemble, "steps_for", lambda *size, **kind: FEWEST_STEPS // 5)
    with compiled_quickly():
        printed = run(page, tmp_path, fewer_steps)
    for block, output in zip(blocks(page), printed, strict=True):
        shown = block["output"] or ""
        assert len(shown.splitlines()) == len(output.splitlines()), (
            f"{page} shows\n{shown}\nbut prints\n{output}"
        )


def marks(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.standard_promotion] * (page in LENIENT) + [pytest.mark.slow] * (page in LONG)


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in PAGES])
def test_pages_run_and_print_what_they_show(page, tmp_path):
    printed = run(page, tmp_path)
    assert printed, f"{page} has no Python blocks"
    for block, output in zip(blocks(page), printed, strict=True):
        assert agree(block["output"] or "", output), f"{page} shows\n{block['output']}\nbut prints\n{output}"


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("L = -1.724", "L = -1.725", True),
        ("L = -1.724", "L = 1.724", False),
        ("W₁: 0.080", "W₁: 0.100", False),
        ("5 of 300", "5 of 300", True),
        ("5 of 300", "6 of 300", False),
        ("mass 0.5", "weight 0.5", False),
    ],
)
def test_the_comparison_tells_outputs_apart(shown, printed, expected):
    assert agree(shown, printed) is expected


def test_pictures_of_the_pages_exist():
    for page in ("README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            # Pictures of a notebook are inside it.
            inside = re.sub(r"^(notebooks/\w+)-\d+\.png$", r"\1.ipynb", target)
            assert ((ROOT / page).parent / inside).exists(), f"{page} shows {target}, which is not there"


def test_the_map_of_the_rooms_is_that_of_the_folders():
    text, folder = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), Path(mf.__file__).parent
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", text, re.M)
    assert {room for room, _ in rows} == {path.parent.name for path in folder.glob("*/__init__.py")}
    files = [f"{room}/{name}" for room, first in rows for name in re.findall(r"`([\w/]+\.py)`", first)]
    files += re.findall(r"`(\w+/\w+\.py)`", text)
    assert len(files) > 30
    missing = [name for name in files if not (folder / name).exists() and not (ROOT / name).exists()]
    assert not missing


def test_the_page_of_times_shows_what_was_measured():
    from verification import fit_times

    found = {f"{kind}; 300; 5": 12.3 for kind in fit_times.KINDS} | {"classes, default; 1000; 5": "> 900"}
    text = fit_times.page(found, "one core")
    assert "| 300 | 5 | 12 | 12 | 12 | 12 |" in text
    assert "| 1,000 | 5 | — | — | > 900 | — |" in text
    assert "on one core" in text


@pytest.mark.slow
def test_a_fit_is_measured_in_a_process_of_its_own():
    from verification import fit_times

    assert 0 < fit_times.measured("classes, given", 60, 3, limit=300.0) < 300
    assert fit_times.measured("regression, default", 60, 3, limit=0.01) == "> 0"


# Their arguments have a default so that leaving them out says which measure to pass.
REQUIRED = ("mf.KL", "mf.SquaredMMD")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
LIKELIHOODS = [
    name
    for name, value in vars(mf.likelihoods).items()
    if isinstance(value, type) and issubclass(value, mf.likelihoods.AbstractLikelihood)
]
SUBMODULES = {
    "mf.theory": mf.theory.__all__,
    "mf.likelihoods": [*LIKELIHOODS, "rescaled"],
    "mf.metrics": mf.metrics.__all__,
    "mf.datasets": ["load_uci", "load_example", "RegressionSet", "Example"],
    "mf.plots": ["interval_plot", "reliability_plot"],
}
PUBLIC = [f"mf.{name}" for name in mf.__all__ if f"mf.{name}" not in SUBMODULES]
PUBLIC += [f"{module}.{name}" for module, names in SUBMODULES.items() for name in names]


@pytest.mark.parametrize("name", PUBLIC)
def test_api_page_names_everything_public(name):
    short = name.split(".")[-1]
    assert f"### {short}\n" in API
    assert re.search(rf"^::: measureflow(\.\w+)*\.{short}$", API, re.M)


@pytest.mark.parametrize("call", re.findall(r"^```python\n(mf\.[^`]*)```$", API, re.M))
def test_api_page_shows_calls_as_they_are(call):
    name, shown = re.fullmatch(r"([\w.]+)\((.*)\)\s*", call, re.S).groups()
    function = operator.attrgetter(name.removeprefix("mf."))(mf)
    parameters = inspect.signature(function).parameters.values()
    first_keyword = next((p.name for p in parameters if p.kind is p.KEYWORD_ONLY), None)
    expected = []
    for parameter in parameters:
        if parameter.name == first_keyword:
            expected.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        if parameter.default is mf.metrics.LEVELS:
            default = "=LEVELS"
        if name in REQUIRED:
            default = ""
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        expected.append(stars + parameter.name + default)
    # The formatter of Markdown prefers the other quotes.
    shown = shown.replace('"', "'")
    assert [part.strip() for part in shown.split(",") if part.strip()] == expected


def refresh(page: str) -> None:
    """Run a page, and write its outputs into it and its pictures beside it."""
    path = ROOT / page
    with tempfile.TemporaryDirectory() as folder:
        outputs = iter(run(page, Path(folder)))
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, ROOT / "docs" / "assets" / picture.name)

    def filled(block: re.Match) -> str:
        output = next(outputs)
        code = f"```python\n{block['code']}```\n"
        return code if block["output"] is None else f"{code}\n```text\n{output}```"

    path.write_text(BLOCK.sub(filled, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or PAGES:
        refresh(each)
