"""Steps that are sent ahead, as they are to a GPU, are the steps of the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, key, rows

import measureflow as mf
from measureflow.runs import program, turns

PRIOR = mf.Gaussian({"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)}, 1.0)
X = jax.random.normal(jax.random.key(9), (12, 3))


def loss(theta, x):
    return jnp.mean((x @ theta["a"] + theta["b"][None] - 1.0) ** 2)


def solved(steps, **more):
    problem = mf.deep_repulsive_langevin_ensemble(loss, PRIOR, mf.SquaredExponential(2.0), mmd=0.3, kl=0.1)
    flow = mf.WassersteinFlow(lambda step: 0.05 / (1 + 0.1 * step.astype(jnp.float32)))
    return mf.solve(problem, flow, PRIOR.sample(key(1), 4), steps, key(2), data=X, **more)


@pytest.mark.parametrize(
    "more",
    [{"record_every": 10}, {"record_every": 13, "batch_size": 4, "collect": mf.Draws(after=5, every=3)}],
)
def test_what_is_sent_ahead_is_what_the_loop_does(more, monkeypatch):
    expected = solved(47, **more)
    monkeypatch.setattr(program, "_runs_ahead", lambda: True)
    found = solved(47, **more)
    assert_close(rows(found.measure.particles), rows(expected.measure.particles))
    assert list(found.history) == list(expected.history)
    for name, column in expected.history.items():
        assert np.allclose(found.history[name], column, rtol=1e-4, atol=1e-6), name
    if "collect" in more:
        assert_close(rows(found.draws), rows(expected.draws))


def test_programs_are_compiled_once(monkeypatch):
    monkeypatch.setattr(program, "_runs_ahead", lambda: True)
    solved(40, record_every=10)
    before = turns._programs.cache_info()
    solved(40, record_every=20)
    after = turns._programs.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits


def test_what_is_packed_comes_apart_again():
    moving = [jnp.ones((4, 3)), jnp.arange(3), jnp.full((4, 2, 5), 2.0), jnp.ones(()), jnp.zeros((2, 2))]
    pack, unpack = turns._packing(moving)
    packed = pack(moving)
    assert [leaf.shape for leaf in packed] == [(4, 13), (3,), (), (2, 2)]
    again = unpack(packed)
    assert all(np.array_equal(a, b) for a, b in zip(again, moving, strict=True))
    monotonous = [jnp.ones((2, 3))]
    assert turns._packing(monotonous)[0](monotonous) == monotonous
