"""Imports go one way, heavy libraries stay where they belong, and the promised names are there."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import measureflow as mf

FOLDER = Path(mf.__file__).parent
MODULES = {
    ".".join(["measureflow", *path.relative_to(FOLDER).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in FOLDER.rglob("*.py")
}


@functools.cache
def imported(name):
    return list(_imported(name))


def _imported(name):
    """Every dotted name that a module imports when it runs, anywhere in it."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import module` imports the module; else the name is one of the source's.
                whole = f"{source}.{alias.name}"
                yield whole if whole in MODULES else source


# From the ground up: a room imports from those before it. Modules beside the rooms come last.
ROOMS = (
    "core",
    "saving",
    "spaces",
    "numerics",
    "statement",
    "flows",
    "runs",
    "sampling",
    "networks",
    "prediction",
    "tables",
    "theory",
    "study",
    "commands",
)


def room(name):
    parts = name.split(".")
    return ROOMS.index(parts[1]) if len(parts) > 1 and parts[1] in ROOMS else len(ROOMS)


def test_rooms_import_from_those_before_them():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)
    pairs = [(name, other) for name in MODULES for other in imported(name) if other in MODULES]
    assert room("measureflow.flows.flow") < room("measureflow.runs.solve") < room("measureflow.cli")
    # A room may ask the package for its version.
    assert not [pair for pair in pairs if room(pair[0]) < room(pair[1]) and pair[1] != "measureflow"]


def test_imports_go_one_way():
    graph = {name: {other for other in imported(name) if other in MODULES} - {name} for name in MODULES}
    assert len(graph) > 20
    assert "measureflow.spaces.measures" in graph["measureflow.spaces.kernels"], "the graph sees imports"
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle
    assert order.index("measureflow.spaces.kernels") < order.index("measureflow.runs.solve")


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("matplotlib", {"prediction.plots", "runs.history", "study.figures"}),
        ("typer", {"cli", "commands.shell"}),
        ("rich", {"cli"}),
        (
            "sklearn",
            {
                "tables.crossvalidation",
                "tables.ensemble",
                "tables.fitted",
                "tables.classifier",
                "tables.regressor",
                "tables.settings",
                "tables.smoother",
                "tables.inputs",
                "study.datasets",
                "study.tables.rivals.classical",
                "commands.baselines",
                "commands.evaluating",
                "commands.report.judging",
            },
        ),
        ("pandas", set()),
        ("polars", set()),
    ],
)
def test_heavy_libraries_stay_in_their_modules(library, allowed):
    users = {name for name in MODULES if any(other.split(".")[0] == library for other in imported(name))}
    assert users <= {f"measureflow.{module}" for module in allowed}


def test_the_test_sees_imports():
    assert any(name.startswith("matplotlib") for name in imported("measureflow.prediction.plots"))
    assert "measureflow.statement.stationarity" in imported("measureflow.statement.problem"), (
        "also `from measureflow import stein`"
    )


def test_importing_measureflow_is_light():
    heavy = ["jax", "scipy", "numpyro", "optax", "beartype"]
    heavy += ["matplotlib", "typer", "rich", "sklearn", "pandas", "IPython"]
    program = f"import sys, measureflow; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_rooms_are_found_without_importing_them():
    program = "import measureflow; print(measureflow.tables.__name__, measureflow.prediction.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["measureflow.tables", "measureflow.prediction"]


PROMISED = {
    "measures": ["Gaussian", "Uniform", "Flat", "Empirical", "FromDistribution"],
    "kernels": ["SquaredExponential", "Matern", "InverseMultiquadric", "median_heuristic"],
    "statement": ["Problem", "KL", "SquaredMMD", "deep_ensemble", "deep_langevin_ensemble"],
    "repulsion": ["deep_repulsive_ensemble", "deep_repulsive_langevin_ensemble"],
    "numerics": ["WassersteinFlow", "ParametricFlow", "MeanFieldGaussian", "solve", "run", "theory"],
}


def test_promised_names():
    assert {name for names in PROMISED.values() for name in names} <= set(mf.__all__)
    assert len(set(mf.__all__)) == len(mf.__all__)
    for name in mf.__all__:
        assert hasattr(mf, name), name
    assert callable(mf.theory.minimiser)
    namespace = {}
    exec("from measureflow import *", namespace)
    assert set(mf.__all__) <= set(namespace)


def test_type_checkers_see_the_names_where_they_are():
    tree = ast.parse(Path(mf.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            seen[alias.name] = whole if whole in MODULES else node.module
    assert seen == mf._PLACES
    assert set(seen) == set(mf.__all__)


def test_completion_shows_names_that_are_not_imported_yet():
    program = "import measureflow; print(sorted(set(measureflow.__all__) - set(dir(measureflow))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="module 'measureflow' has no attribute 'EnsembleRegresor'"):
        getattr(mf, "Ensemble" + "Regresor")


def test_every_module_says_what_it_is():
    silent = [
        name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not silent
