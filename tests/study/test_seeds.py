"""Many runs side by side: on the one driver, the same bits as one call, with progress and Ctrl-C."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import measureflow as mf
from measureflow.runs.together import Together
from measureflow.study.paper import seeds, uci

# The paper's networks are written for JAX's own promotion.
pytestmark = pytest.mark.standard_promotion

PRIOR = mf.Gaussian(jnp.zeros(1), 1.0)
FLOW = mf.WassersteinFlow(1e-2)


def loss(theta):
    return jnp.sum(theta**4 / 4 - theta**2)


def problem():
    kernel = mf.SquaredExponential(1.0)
    return mf.deep_repulsive_langevin_ensemble(loss, PRIOR, kernel, mmd=0.5, kl=1.0)


def keys(number=3):
    return jax.random.split(jax.random.key(0), number)


def test_however_calls_are_cut_the_bits_are_the_same():
    found = seeds.particles_of_seeds(problem(), FLOW, PRIOR, 5, 777, keys())
    start, run = jax.vmap(jax.random.split)(keys()).T
    states = jax.vmap(lambda key: FLOW.init(problem(), PRIOR.sample(key, 5)))(start)
    whole = seeds._advance(problem(), FLOW, run, states, jnp.asarray(777))
    assert found.shape == (3, 5, 1)
    assert np.array_equal(found, whole.particles)


def test_progress_has_a_name(capfd):
    seeds.particles_of_seeds(problem(), FLOW, PRIOR, 5, 50, keys(), "three seeds")
    assert "three seeds: 100%" in capfd.readouterr().err
    seeds.particles_of_seeds(problem(), FLOW, PRIOR, 5, 50, keys())
    assert capfd.readouterr().err == ""


def interrupted(advance):
    def wrong(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return advance(*arguments)

    return wrong


def test_ctrl_c_ends_it(monkeypatch):
    monkeypatch.setattr(seeds, "_advance", interrupted(seeds._advance))
    with pytest.raises(KeyboardInterrupt, match=r"SIGINT at step \d+ of 1000000"):
        seeds.particles_of_seeds(problem(), FLOW, PRIOR, 5, 1_000_000, keys())


def test_no_step_is_taken_twice_or_left_out():
    counts = []

    def count(state, steps):
        counts.append(int(steps))
        return state + steps

    assert Together(count, jnp.asarray(0)).to(1_000) == 1_000
    assert sum(counts) == 1_000
    assert Together(count, jnp.asarray(0)).to(0) == 0


@pytest.mark.slow
def test_the_splits_of_a_table_are_trained_as_one_call_would():
    rng = np.random.default_rng(0)
    data = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 250, 3), (2, 250)))
    start = uci._starts(uci._kaiming(3), keys(2))
    stated = [
        (uci._statement("DLE", 3, jax.random.key(1), tau, None), mf.WassersteinFlow(eta))
        for eta, tau in ((0.01, 1e-4), (0.02, 1e-3))
    ]
    found = uci._train(stated, start, data, keys(2), 30)
    together, states = uci._side_by_side(stated, start)
    whole = uci._advance(together, data, keys(2), states, jnp.asarray(30))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, whole.particles))
    for k, one in enumerate(stated):
        alone = uci._train([one], start, data, keys(2), 30)
        assert jax.tree.all(jax.tree.map(lambda x, y, k=k: np.allclose(x[k], y[0], atol=1e-5), found, alone))
    assert not np.allclose(found["w1"][0], found["w1"][1], atol=1e-3)
