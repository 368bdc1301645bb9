"""The page that compares flows: its exact draws are those of its problems, and its errors are distances."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from verification import flow_problems, which_flow, which_flow_page

import measureflow as mf

pytestmark = pytest.mark.standard_promotion


NETWORK = "small Bayesian network"


# Its draws are a run of NUTS.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == NETWORK else ()) for n in which_flow.CASES]
)
def test_exact_draws_are_those_of_the_problem(name):
    case = which_flow.CASES[name]()
    draws = jnp.asarray(case.draws[:: len(case.draws) // 1000], jnp.float32)
    assert case.problem.certify(draws)
    # Mutant: draws of a wider law; of the network, where a wider one takes 5,000 draws to notice, a narrower.
    assert not case.problem.certify((0.7 if name == "mean-field network" else 1.3) * draws)


def test_networks_whose_units_are_swapped_are_the_same(monkeypatch):
    """They are compared by what they say."""
    monkeypatch.setattr(flow_problems, "_by_nuts", lambda *_: np.zeros((4, 31)))
    view = flow_problems.small_network().view
    found = np.random.default_rng(0).normal(size=(5, 31))
    order = np.random.default_rng(1).permutation(10)
    swapped = np.concatenate(
        [found[:, :-1].reshape(5, 3, 10)[:, :, order].reshape(5, 30), found[:, -1:]], axis=1
    )
    assert_close(view(swapped), view(found), 1e-5)
    assert np.abs(view(-found) - view(found)).max() > 0.1


def test_noise_alone_leaves_the_masses_of_modes_as_they_were():
    """0.8 and 0.2 at a distance of ten deviations, from a half each: what tempering is for."""
    case = flow_problems.two_modes()
    assert np.mean(case.draws < 0) == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / len(case.draws)))
    found = which_flow.run(case, mf.WassersteinFlow(0.25), 50, 0).found
    assert np.mean(found < 0) == 0.5


def test_the_page_says_which_kernel_is_better_by_the_numbers():
    """By more than two standard errors of what is paired by seed, and what 100 particles are worth."""
    ahead, level = [0.10, 0.21, 0.29], [0.20, 0.30, 0.41]
    flows = {which_flow_page.MULTIQUADRIC: ahead, which_flow_page.SQUARED: level}

    def case(flows):
        measured = {
            name: {"errors": errors, "seconds": 0.5, "means": 0.2, "deviations": 0.9, "numbers": [0.4, 0.2]}
            for name, errors in flows.items()
        }
        draws = {"10": 0.3, "100": 0.1}
        return {"flows": measured, "sample": None, "exact draws": draws}

    even = dict(zip(flows, ([0.1, 0.3, 0.2], [0.2, 0.2, 0.2]), strict=True))
    records = {
        which_flow_page.NETWORK: case(flows),
        "funnel": case(even),
        which_flow_page.MODES: {"noise": 0.5},
    }
    by_hand = "## What to take from it\n\n- by hand\n"
    page = which_flow_page.page(records, f"old\n\n{by_hand}", 100, 1_000, (10, 100), 2, 3)
    assert "the inverse multiquadric on 1 of 2 (small Bayesian network)" in page
    assert "the squared exponential on 0 of 2;" in page
    # 100 (0.1/0.2)² = 25 exact draws.
    assert "| Stein, inverse multiquadric | 25 | 25 |" in page
    assert "| noise | 0.50 |" in page
    assert page.endswith(by_hand)
    assert "old" not in page


def test_errors_are_distances_in_standard_deviations():
    """A shift by a tenth of the deviation in one of two coordinates."""
    exact = np.random.default_rng(0).normal(size=(500, 2)) * [1.0, 5.0]
    assert which_flow.error(exact, exact) == 0
    moved = exact + np.array([0.0, 0.1 * np.std(exact[:, 1])])
    assert which_flow.error(moved, exact) == pytest.approx(0.05)
    assert which_flow.error(np.full((3, 2), np.nan), exact) == np.inf
