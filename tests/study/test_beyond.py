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
from measureflow.study.beyond import location, predictively_oriented, predictively_oriented_uci
from measureflow.study.beyond.mean_field_langevin import _stepped
from measureflow.study.beyond.predictively_oriented import Location
from measureflow.study.beyond.second_order_bounds import laplace, objectives
from measureflow.study.paper.claims import Claim, Reproduction

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


def test_verdicts_are_paired_by_split():
    """Better by 0.1 on every split, though splits differ by far more: a win."""
    level = np.array([0.0, 5.0, 2.0])
    scores = {("yacht", "DLE"): np.stack([level, level])}
    scores["yacht", "PrO"] = np.stack([level - 0.1 + [0.01, -0.01, 0.0], level])
    claim = predictively_oriented_uci._judged("better", scores, ("yacht",), "PrO")
    assert claim.holds
    assert claim.measured == "1 wins, 0 losses of 1"
    swapped = {("yacht", "DLE"): scores["yacht", "PrO"], ("yacht", "PrO"): scores["yacht", "DLE"]}
    assert not predictively_oriented_uci._judged("better", swapped, ("yacht",), "PrO").holds


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


def test_unknown_names_list_these_too(made_by_hand):
    done = CliRunner().invoke(cli.app, ["reproduce", "mean-field"])
    assert done.exit_code == 2
    assert "mean-field-langevin" in done.output
    assert made_by_hand == []
