"""The page that compares flows: its exact draws are those of its problems, and its errors are distances."""

import jax.numpy as jnp
import numpy as np
import pytest
from verification import which_flow

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("name", which_flow.CASES)
def test_exact_draws_are_those_of_the_problem(name):
    case = which_flow.CASES[name]()
    draws = jnp.asarray(case.exact[:1000], jnp.float32)
    assert case.problem.certify(draws)
    # Mutant: draws of a wider law; of the network, where a wider one takes 5,000 draws to notice, a narrower.
    assert not case.problem.certify((0.7 if name == "mean-field network" else 1.3) * draws)


def test_errors_are_distances_in_standard_deviations():
    """A shift by a tenth of the deviation in one of two coordinates."""
    exact = np.random.default_rng(0).normal(size=(500, 2)) * [1.0, 5.0]
    assert which_flow.error(exact, exact) == 0
    moved = exact + np.array([0.0, 0.1 * np.std(exact[:, 1])])
    assert which_flow.error(moved, exact) == pytest.approx(0.05)
    assert which_flow.error(np.full((3, 2), np.nan), exact) == np.inf
