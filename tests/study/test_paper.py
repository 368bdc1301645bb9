"""The paper's figures and claims, in their quick form; and that broken physics does not pass."""

import json
import os

import equinox as eqx
import jax
import numpy as np
import pytest
from typer.testing import CliRunner
from verification import paper_page

import measureflow as mf
from measureflow import cli
from measureflow.flows import wasserstein
from measureflow.numerics.interactions import AbstractInteractions
from measureflow.statement import divergences
from measureflow.study import datasets
from measureflow.study.paper import NAMES

# The others take minutes: `make verify`.
QUICK = ("lifting", "few-particles")
KEYS = ["claim", "kind", "expected", "measured", "tolerance", "holds", "note"]


@pytest.fixture
def reproduce(tmp_path, monkeypatch):
    """Runs the command line in a folder of its own; programs compiled before do not know of patches."""

    def run(*arguments):
        return CliRunner().invoke(cli.app, ["reproduce", *arguments])

    monkeypatch.chdir(tmp_path)
    jax.clear_caches()
    eqx.clear_caches()
    yield run
    jax.clear_caches()
    eqx.clear_caches()


@pytest.mark.few(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in NAMES if name != "uci"],
)
def test_theory_holds_and_everything_is_written(name, reproduce, tmp_path):
    result = reproduce(name, "--out", "results", "--quick", "--seed", "1")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "results" / name
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()
    claims = json.loads((folder / "claims.json").read_text())
    assert all(list(claim) == KEYS for claim in claims)
    assert all(claim["holds"] for claim in claims if claim["kind"] == "theory")
    assert all("quick run" in claim["note"] for claim in claims)
    record = json.loads((folder / "provenance.json").read_text())
    assert record["seed"] == 1
    assert record["quick"] is True
    assert record["measureflow"] == mf.__version__


def _halved_noise(monkeypatch):
    right = wasserstein.euler_maruyama

    def wrong(particles, gradient, step_size, temperature, precondition, key):
        temperature = None if temperature is None else temperature / 2
        return right(particles, gradient, step_size, temperature, precondition, key)

    monkeypatch.setattr(wasserstein, "euler_maruyama", wrong)


def _flipped_prior(monkeypatch):
    monkeypatch.setattr(divergences, "negative_log_density", lambda p, theta: p.log_density(theta))


def _scaled_repulsion(factor):
    def patch(monkeypatch):
        right = AbstractInteractions.gradient

        def wrong(self, kernel, particles, *how):
            return jax.tree.map(lambda leaf: factor * leaf, right(self, kernel, particles, *how))

        monkeypatch.setattr(AbstractInteractions, "gradient", wrong)

    return patch


def _flipped_embedding(monkeypatch):
    monkeypatch.setattr(divergences, "_minus_twice", lambda embedding, theta: 2 * embedding(theta))


MUTANTS = {
    "noise variance halved": _halved_noise,
    "prior pull flipped": _flipped_prior,
    "repulsion off": _scaled_repulsion(0.0),
    "repulsion doubled": _scaled_repulsion(2.0),
    "embedding flipped": _flipped_embedding,
}

QUICK_MUTANTS = ("repulsion off",)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "mutant",
    # The others are caught, too, in minutes: `make verify`.
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_MUTANTS)) for name in MUTANTS],
)
def test_broken_physics_is_caught(mutant, reproduce, monkeypatch, tmp_path):
    MUTANTS[mutant](monkeypatch)
    assert reproduce("minimisers", "--out", "results", "--quick").exit_code == 1
    claims = json.loads((tmp_path / "results" / "minimisers" / "claims.json").read_text())
    # It is the particles that are wrong, not only a formula: a law test fails.
    assert any(not claim["holds"] for claim in claims if "particles together" in claim["claim"])


def test_unknown_names_list_the_known(reproduce):
    result = reproduce("minimizers")
    assert result.exit_code == 2
    assert "minimisers" in result.output
    assert "convergence" in result.output


def test_results_are_not_overwritten(reproduce, tmp_path):
    precious = tmp_path / "results" / "lifting" / "notes.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    result = reproduce("lifting", "--out", "results", "--quick")
    assert result.exit_code == 2
    assert "--force" in result.output
    assert list(precious.parent.iterdir()) == [precious]
    assert reproduce("lifting", "--out", "results", "--quick", "--force").exit_code == 0
    assert precious.read_text() == "mine"


def test_the_page_shows_what_the_command_wrote(reproduce, monkeypatch, tmp_path):
    reproduce("lifting", "--out", "results", "--quick")
    monkeypatch.setattr(paper_page, "DOCS", tmp_path)
    (tmp_path / "assets" / "paper").mkdir(parents=True)
    page = paper_page.page(tmp_path / "results", [])
    claims = json.loads((tmp_path / "results" / "lifting" / "claims.json").read_text())
    assert all(claim["claim"] in page for claim in claims)
    assert page.count("| yes |") == len(claims)
    assert (tmp_path / "assets" / "paper" / "lifting.png").exists()
    assert "Figure 2" not in page


@pytest.mark.skipif(
    datasets.FOLDER not in os.environ, reason=f"{datasets.FOLDER} names no folder of UCI sets"
)
def test_the_canonical_splits_are_those_of_the_folder():
    for name, rows, features in (("yacht", 308, 6), ("energy", 768, 8), ("naval", 11934, 16)):
        data = datasets.load_uci(name)
        assert data.inputs.shape == (rows, features)
        assert len(data.splits) == 20
        for train, test in data.splits:
            assert sorted([*train, *test]) == list(range(rows))


def test_missing_data_say_what_to_do(reproduce, monkeypatch, tmp_path):
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    monkeypatch.setattr(datasets, "SOURCE", "http://127.0.0.1:1")
    monkeypatch.setattr(datasets, "RETRIES", 0)
    monkeypatch.setattr(datasets, "_cache", lambda: tmp_path / "cache")
    monkeypatch.setenv("NO_PROXY", "*")
    result = reproduce("uci", "--out", "results")
    assert result.exit_code == 2
    assert "could not download http://127.0.0.1:1/kin8nm/data/data.txt" in " ".join(result.output.split())
    assert "or set MEASUREFLOW_DATA to a folder" in " ".join(result.output.split())
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path))
    assert "has no kin8nm/data.txt" in " ".join(reproduce("uci", "--out", "results").output.split())
    assert not (tmp_path / "results").exists()
    with pytest.raises(ValueError, match="known are boston"):
        datasets.load_uci("iris")


def make_set(folder, rows, features, splits, rng):
    """A data set in the layout of the UCI folder, with floats for indices as some of its files have."""
    folder.mkdir(parents=True)
    inputs = rng.normal(size=(rows, features))
    table = np.column_stack([inputs, inputs @ rng.normal(size=features) + 0.1 * rng.normal(size=rows)])
    np.savetxt(folder / "data.txt", table)
    np.savetxt(folder / "index_features.txt", np.arange(features))
    np.savetxt(folder / "index_target.txt", [features])
    np.savetxt(folder / "n_splits.txt", [splits])
    for i in range(splits):
        order = rng.permutation(rows)
        np.savetxt(folder / f"index_train_{i}.txt", order[rows // 10 :])
        np.savetxt(folder / f"index_test_{i}.txt", order[: rows // 10])
    return table


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_uci_table_runs_on_any_data_in_that_layout(reproduce, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    for name in datasets.NAMES.values():
        table = make_set(tmp_path / "data" / name, 300, 3, 5, rng)
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path / "data"))
    loaded = datasets.load_uci("yacht")
    np.testing.assert_allclose(loaded.inputs, table[:, :3])
    assert len(loaded.splits) == 5
    train, test = loaded.splits[0]
    assert sorted([*train, *test]) == list(range(300))
    result = reproduce("uci", "--out", "results", "--quick")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "results" / "uci" / "provenance.json").read_text())
    (rows,) = [value for key, value in record.items() if key.startswith("Table 1")]
    # A linear target with 10% noise: the ensembles must beat the mean by far.
    assert all(row["median RMSE"] < 0.5 for row in rows)
    assert {row["method"] for row in rows} == {"DE", "DLE", "DRLE"}
