"""Loops of fixed length, as a GPU has them, are the loop whose length is data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, key, rows

import measureflow as mf
from measureflow.runs import program

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
    [{"record_every": 10}, {"record_every": 20, "batch_size": 4, "collect": mf.Draws(after=5, every=3)}],
)
def test_turns_are_the_loop(more, monkeypatch):
    expected = solved(187, **more)
    monkeypatch.setattr(program, "_waits_for_the_host", lambda: True)
    found = solved(187, **more)
    assert_close(rows(found.measure.particles), rows(expected.measure.particles))
    assert list(found.history) == list(expected.history)
    for name, column in expected.history.items():
        assert np.allclose(found.history[name], column, rtol=1e-4, atol=1e-6), name
    if "collect" in more:
        assert_close(rows(found.draws), rows(expected.draws))


@pytest.mark.parametrize(
    ("records", "steps", "chunks"), [(1, 10, 0), (9, 10, 1), (16, 10, 2), (9, 20, 2), (15, 30, 3), (8, 13, 0)]
)
def test_a_chunk_does_not_end_between_two_records(records, steps, chunks):
    assert program._chunks(records, steps) == chunks
    turns = chunks * program._TURNS_OF_A_CHUNK
    assert turns * 10 % steps == 0
    assert turns * 10 <= records * steps


def test_a_record_beyond_the_end_is_dropped():
    table = program.Table.empty({"a": jnp.ones(()), "n": jnp.ones((), jnp.int32), "b": jnp.ones(())}, 2)
    for slot, value in ((1, 3.0), (2, 5.0)):
        table = table.recorded(
            jnp.asarray(slot), {"a": jnp.asarray(value), "n": jnp.asarray(7), "b": jnp.asarray(-value)}
        )
    found = {name: column.tolist() for name, column in table.columns().items()}
    assert found == {"a": [0.0, 3.0], "b": [0.0, -3.0], "n": [0, 7]}
