"""A largest drift: a batch that nothing led to expect moves no particle far, and stops no other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import measureflow as mf

LARGEST, SEEN = 2.0, 300


def drifts(key, count=8):
    """Of a tree with two leaves; coordinates of the second are a hundred times as large."""
    first, second = jax.random.split(key)
    return {
        "a": jax.random.normal(first, (count, 3)),
        "b": 100 * jax.random.normal(second, (count, 2, 2)),
    }


@eqx.filter_jit
def learned(preconditioner):
    def seen(step, memory):
        drift = preconditioner.limited(memory, drifts(jax.random.key(step)), step)
        return preconditioner.update(memory, drift, drift, step)

    return jax.lax.fori_loop(0, SEEN, seen, preconditioner.init(drifts(jax.random.key(0))))


def with_a_wild_particle(size):
    usual = drifts(jax.random.key(SEEN))
    return jax.tree.map(lambda leaf: leaf.at[0].multiply(size), usual)


def relative_sizes(drift, memory, decay=0.99):
    """Root mean squares of drifts in units of √v, by NumPy."""
    v = {name: np.asarray(leaf, float) / (1 - decay**SEEN) for name, leaf in memory.items()}
    squares = [np.asarray(drift[name], float) ** 2 / v[name] for name in drift]
    return np.sqrt(np.concatenate([leaf.reshape(len(leaf), -1) for leaf in squares], 1).mean(1))


@pytest.mark.parametrize("size", [1e3, 1e10, 1e25])
def test_a_wild_drift_is_scaled_down_and_no_other(size):
    preconditioner = mf.RMSPreconditioner(10_000, largest=LARGEST)
    memory, wild = learned(preconditioner), with_a_wild_particle(size)
    limited = preconditioner.limited(memory, wild, jnp.asarray(SEEN))
    others = jax.tree.map(lambda leaf: leaf[1:], (limited, wild))
    assert max(relative_sizes(others[1], memory)) < LARGEST  # nothing to scale down
    assert all(np.array_equal(others[0][name], others[1][name]) for name in wild)
    if size < 1e15:
        assert relative_sizes(limited, memory)[0] == pytest.approx(LARGEST, rel=1e-4)
        ratio = limited["b"][0] / wild["b"][0]
        np.testing.assert_allclose(ratio, limited["a"][0, 0] / wild["a"][0, 0], rtol=1e-5)  # its direction
    else:  # its square is no number in single precision, and it does not move at all
        assert relative_sizes(limited, memory)[0] == 0


def test_a_wild_drift_stops_no_other_particle():
    """v grows by at most 1 + (1 − decay)·(c²·J − 1); the mutant, which believes it, stops all others."""

    def g_ratio(largest):
        preconditioner = mf.RMSPreconditioner(10_000, largest=largest)
        memory, step = learned(preconditioner), jnp.asarray(SEEN)
        wild = preconditioner.limited(memory, with_a_wild_particle(1e6), step)
        after = preconditioner.update(memory, wild, wild, step)
        before = preconditioner.diagonal(memory, step - 1)["b"]
        return np.asarray(preconditioner.diagonal(after, step)["b"] / before)

    assert np.all(g_ratio(LARGEST) > (1 + 0.01 * (LARGEST**2 * 7 - 1)) ** -0.5)
    assert np.all(g_ratio(None) < 1e-3)


def test_rare_wild_batches_do_not_keep_the_particles_from_the_minimum():
    problem = mf.deep_ensemble(
        lambda theta, batch: 0.5 * jnp.sum((theta - 1) ** 2) + jnp.mean(batch) * jnp.sum(theta)
    )
    cases = np.zeros((1_000, 1), np.float32)
    cases[::100], cases[50::100] = 1e6, -1e6

    def distance(largest):
        flow = mf.WassersteinFlow(0.02, mf.RMSPreconditioner(10_000, largest=largest), momentum=0.9)
        start = jax.random.normal(jax.random.key(1), (5, 3))
        solution = mf.solve(
            problem, flow, start, 400, jax.random.key(2), data=jnp.asarray(cases), batch_size=1
        )
        return float(jnp.max(jnp.abs(solution.measure.particles - 1)))

    # 0.1 is five steps of full size: one wild batch moves a particle by two of them at most.
    assert distance(2.0) < 0.1 < distance(None)


@pytest.mark.parametrize(
    "flow",
    [mf.WassersteinFlow, lambda step, g: mf.SteinFlow(mf.SquaredExponential(1.0), step, preconditioner=g)],
)
def test_flows_ask_for_it(flow):
    """The first step knows nothing; the second is limited to c = 0.1 of what the first had."""

    def second_step(largest):
        moving = flow(0.1, mf.RMSPreconditioner(10, largest=largest))
        problem = mf.deep_ensemble(lambda theta: 0.5 * jnp.sum(theta**2))
        state = moving.init(problem, jnp.array([[3.0, 4.0]]))
        before = moving.step(problem, state, None, jax.random.key(0))
        after = moving.step(problem, before, None, jax.random.key(0))
        return np.linalg.norm(after.particles - before.particles)

    assert second_step(0.1) < 0.2 * second_step(None)
