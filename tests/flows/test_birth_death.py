"""Birth and death: the law of Fisher–Rao at all times, and masses that noise alone leaves wrong."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verification.laws import dle, exact

import measureflow as mf
from measureflow.study.paper.multimodal import nearest_mode

KEY = jax.random.key(0)
N = 4_000


class Still(mf.AbstractFlow):
    """Moves nothing."""

    def init(self, problem: mf.Problem, initial: Any) -> Any:
        return mf.ParticleState(initial, jnp.zeros((), jnp.int32))

    def step(self, problem: mf.Problem, state: Any, batch: Any, key: Any) -> Any:
        return eqx.tree_at(lambda s: s.step, state, state.step + 1)

    def measure(self, state: Any) -> mf.Empirical:
        return mf.Empirical(state.particles)


def standard_normal_problem():
    return mf.Problem(lambda t: 0.5 * jnp.sum(t**2), mf.KL(mf.Flat()))


@pytest.mark.few(1)
@pytest.mark.parametrize("time", [0.3, 0.8])
def test_fisher_rao_has_its_law_at_all_times(time):
    """q₀ = N(0, 4), π = N(0, 1): q_t is Gaussian with precision e^{−t}/4 + 1 − e^{−t}."""
    start = 2 * jax.random.normal(KEY, (N, 1))
    steps = 100
    flow = mf.BirthDeath(Still(), time / steps, bandwidth=0.1)
    end = mf.solve(standard_normal_problem(), flow, start, steps, KEY, certify=False).measure.particles
    expected = 1 / (np.exp(-time) / 4 + 1 - np.exp(-time))
    # Copies are not independent: their number of families is what counts.
    families = len(np.unique(np.asarray(end)))
    assert abs(float(jnp.var(end)) / expected - 1) < 4 * np.sqrt(2 / families) + 0.03
    # Half and twice the time are other laws.
    for wrong in (0.5, 2.0):
        other = 1 / (np.exp(-wrong * time) / 4 + 1 - np.exp(-wrong * time))
        assert abs(float(jnp.var(end)) / other - 1) > 4 * np.sqrt(2 / families) + 0.03


def test_particles_that_start_right_of_the_barrier_reach_the_mass_left_of_it():
    problem, law = dle(), exact(dle())
    assert law.mass_below(0.0) == pytest.approx(0.870, abs=5e-4)
    start = 1 + 0.2 * jax.random.normal(KEY, (1_000, 1))
    flow = mf.BirthDeath(mf.WassersteinFlow(0.02), 0.02)
    end = np.asarray(mf.solve(problem, flow, start, 1_500, KEY).measure.particles)
    # Copies within the time that noise takes to part them are one draw: about a third are independent.
    assert abs((end < 0).mean() - law.mass_below(0.0)) < 4 * np.sqrt(0.87 * 0.13 / 300)
    alone = mf.solve(problem, mf.WassersteinFlow(0.02), start, 20, KEY).measure.particles
    assert np.asarray(alone < 0).mean() < 0.5


@pytest.mark.slow
def test_the_four_modes_of_figure_3_get_their_masses_from_a_lopsided_start():
    """Two thirds of the particles start at one of four equal modes. Barriers are 19 τ high: none crosses."""
    problem = mf.deep_langevin_ensemble(mf.theory.four_modes_loss, mf.Flat(), kl=0.2)
    start = mf.Gaussian(jnp.ones(2), 1.0).sample(KEY, 300)
    flow = mf.WassersteinFlow(0.1)
    shares = {}
    for name, each in (("alone", flow), ("cured", mf.BirthDeath(flow, 0.02, 0.1))):
        end = mf.solve(problem, each, start, 1_000, KEY).measure.particles
        shares[name] = np.bincount(nearest_mode(np.asarray(end)), minlength=4) / 300
    # A third of the particles count as independent, as above.
    tolerance = 4 * np.sqrt(0.25 * 0.75 / 100)
    assert np.all(np.abs(shares["cured"] - 0.25) < tolerance)
    assert shares["alone"].max() - 0.25 > 2 * tolerance


def test_bad_input():
    with pytest.raises(ValueError, match="BirthDeath was given a problem without temperature"):
        mf.BirthDeath(mf.WassersteinFlow(0.1), 0.1).init(
            mf.deep_ensemble(lambda t: jnp.sum(t)), jnp.ones((4, 1))
        )
    with pytest.raises(ValueError, match="BirthDeath rate must be > 0"):
        mf.BirthDeath(mf.WassersteinFlow(0.1), 0.0)
