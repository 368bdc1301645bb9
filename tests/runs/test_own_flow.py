"""A flow as a user writes it, with all that a run offers: progress, checkpoints, draws, callbacks,
devices."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import key

import measureflow as mf

PRIOR = mf.Gaussian(jnp.zeros(2), 1.0)
TARGET = jnp.array([0.5, -1.0])
N = 40


def loss(theta):
    return 0.5 * jnp.sum((theta - TARGET) ** 2 * jnp.array([4.0, 1.0]))


PROBLEM = mf.Problem(loss, 1.0 * mf.KL(mf.Flat()))
START = PRIOR.sample(key(0), N)


class SVGD(mf.AbstractFlow):
    """Stein variational gradient descent (Liu and Wang, 2016), in fifteen lines."""

    kernel: mf.AbstractKernel
    step_size: float

    def init(self, problem, initial):
        return mf.ParticleState(initial, jnp.zeros((), jnp.int32))

    def step(self, problem, state, batch, key):
        x, tau = state.particles, problem.temperature()
        drift = problem.wasserstein_gradient(x, batch)
        gram = jax.vmap(lambda a: jax.vmap(lambda b: self.kernel(b, a))(x))(x)
        repulsion = jax.vmap(lambda a: jax.vmap(lambda b: jax.grad(self.kernel)(b, a))(x))(x)
        velocity = (gram @ drift - tau * repulsion.sum(axis=1)) / len(x)
        return mf.ParticleState(x - self.step_size * velocity, state.step + 1)

    def measure(self, state):
        return mf.Empirical(state.particles)


class Cloud(typing.NamedTuple):
    points: jax.Array


class Langevin(mf.AbstractFlow):
    """The same three methods, on a state that does not count its steps."""

    step_size: float

    def init(self, problem, initial):
        return Cloud(initial)

    def step(self, problem, state, batch, key):
        x = state.points
        noise = jax.random.normal(key, x.shape)
        drift = problem.wasserstein_gradient(x, batch)
        return Cloud(
            x - self.step_size * drift + jnp.sqrt(2 * self.step_size * problem.temperature()) * noise
        )

    def measure(self, state):
        return mf.Empirical(state.points)


FLOWS = {"SVGD": SVGD(mf.SquaredExponential(1.0), 0.1), "Langevin": Langevin(0.05)}


def solve(flow, steps=60, **options):
    return mf.solve(PROBLEM, flow, START, steps, key(1), **options)


def test_svgd_finds_the_mean():
    """At a fixed point of SVGD with a Gaussian target the mean is right for a kernel that sees linear
    functions; with this one, near it."""
    solution = solve(FLOWS["SVGD"], steps=400)
    assert np.abs(np.mean(solution.measure.particles, axis=0) - TARGET).max() < 0.05
    assert {"loss", "gradient_norm", "step"} <= set(solution.history)
    assert solution.history.loss[-1] < solution.history.loss[0]


@pytest.mark.parametrize("name", FLOWS)
def test_continuing_is_exact(name):
    whole, part = solve(FLOWS[name]), solve(FLOWS[name], steps=25)
    rest = mf.solve(PROBLEM, FLOWS[name], part.state, 35, key(1))
    np.testing.assert_array_equal(rest.measure.particles, whole.measure.particles)
    assert int(rest.state.step) == 60


@pytest.mark.parametrize("name", FLOWS)
def test_checkpoint_progress_and_draws(name, tmp_path, capsys):
    collect = mf.Draws(after=10, every=5)
    straight = solve(FLOWS[name], progress=True, collect=collect)
    assert "60/60" in capsys.readouterr().err
    folder = tmp_path / "run"
    solve(FLOWS[name], steps=25, collect=collect, checkpoint=mf.Checkpoint(folder, every=10))
    resumed = solve(FLOWS[name], collect=collect, checkpoint=mf.Checkpoint(folder, every=10))
    assert "resuming at step 25 of 60" in capsys.readouterr().err
    np.testing.assert_array_equal(resumed.measure.particles, straight.measure.particles)
    assert straight.draws.shape == (N, 10, 2)
    np.testing.assert_array_equal(resumed.draws, straight.draws)
    # Draw k is the state after 10 + 5(k + 1) steps.
    np.testing.assert_array_equal(straight.draws[:, 2], solve(FLOWS[name], steps=25).measure.particles)
    np.testing.assert_array_equal(straight.draws[:, -1], straight.measure.particles)


def test_noise_is_new_at_every_step():
    """A state that does not count gets a key of its own for every step: the variance of its law says so."""
    problem = mf.Problem(lambda theta: 0.5 * jnp.sum(theta**2), 1.0 * mf.KL(mf.Flat()))
    n = 4_000
    solution = mf.solve(problem, Langevin(0.2), jnp.zeros((n, 1)), 100, key(2))
    variance = float(jnp.var(solution.measure.particles))
    expected = 1 / (1 - 0.1)
    assert abs(variance / expected - 1) < 4 * np.sqrt(2 / n)


@pytest.mark.few(4)
@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("record_every", [1, 4, 100])
def test_draws_do_not_depend_on_how_calls_are_cut(every, record_every, monkeypatch):
    flow, collect = mf.WassersteinFlow(1e-2), mf.Draws(after=4, every=every)
    states = [solve(flow, steps=s).measure.particles for s in range(4 + every, 31, every)]
    monkeypatch.setattr("measureflow.runs.draws._MOST", 2)
    solution = solve(flow, steps=30, collect=collect, record_every=record_every)
    assert solution.draws.shape == (N, len(states), 2)
    np.testing.assert_array_equal(np.swapaxes(solution.draws, 0, 1), np.stack(states))
    assert "draws" in repr(solution)


def test_draws_of_a_continued_run_are_its_own():
    flow, collect = mf.WassersteinFlow(1e-2), mf.Draws(every=10)
    whole = solve(flow, collect=collect)
    part = solve(flow, steps=30, collect=collect)
    rest = mf.solve(PROBLEM, flow, part.state, 30, key(1), collect=collect)
    joined = np.concatenate([part.draws, rest.draws], axis=1)
    np.testing.assert_array_equal(joined, whole.draws)


def test_draws_survive_restarts():
    """A particle that diverges is a copy of another one in the draws, too."""

    def pit(theta):
        return (
            loss(theta)
            - 20.0 * theta[0] * (theta[1] > 5.0).astype(theta.dtype)
            + 1e-3 * jnp.sqrt(3.0 - theta[0])
        )

    start = START.at[0].set(jnp.array([2.5, 9.0]))
    flow = mf.WassersteinFlow(0.02)
    with pytest.warns(UserWarning, match="became NaN or infinite"):
        solution = mf.solve(
            mf.Problem(pit), flow, start, 20, key(1), on_divergence="restart", collect=mf.Draws()
        )
    assert solution.restarts
    assert solution.draws.shape == (N, 20, 2)
    assert np.isfinite(solution.draws).all()
    np.testing.assert_array_equal(solution.draws[:, -1], solution.measure.particles)


def test_a_callback_sees_steps_records_and_states_and_can_stop():
    seen = []

    def watch(step, record, state):
        seen.append((step, float(record["loss"]), np.asarray(state.particles)))
        return step >= 30

    solution = solve(mf.WassersteinFlow(1e-2), steps=5_000, callback=watch, record_every=5)
    stopped = int(solution.state.step)
    assert 30 <= stopped < 5_000
    assert seen[-1][0] == stopped
    np.testing.assert_array_equal(seen[-1][2], solution.measure.particles)
    straight = solve(mf.WassersteinFlow(1e-2), steps=stopped)
    np.testing.assert_array_equal(solution.measure.particles, straight.measure.particles)


class NoMeasure(SVGD):
    def measure(self, state):
        return state.particles


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect": 10}, "collect must be of type Draws, got 10; pass mf.Draws"),
        ({"callback": 3}, r"callback must be a function of \(step, record, state\), got 3"),
        ({"checkpoint": "folder"}, "checkpoint must be of type Checkpoint, got 'folder'"),
    ],
)
@pytest.mark.usefixtures("as_a_user_runs_it")
def test_bad_options(options, message):
    with pytest.raises(TypeError, match=message):
        solve(mf.WassersteinFlow(1e-2), **options)


def test_a_flow_without_a_measure():
    flow = NoMeasure(mf.SquaredExponential(1.0), 0.1)
    with pytest.raises(TypeError, match=r"NoMeasure.measure must return a measure"):
        solve(flow)


def test_draws_that_do_not_fit(monkeypatch):
    monkeypatch.setattr("measureflow.runs.draws.free_memory", lambda: 1e4)
    with pytest.raises(ValueError, match=r"keeps 60 draws of all particles.*keep fewer, with a larger every"):
        solve(mf.WassersteinFlow(1e-2), collect=mf.Draws())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="GiB are free"):
        mf.solve(PROBLEM, mf.WassersteinFlow(1e-2), START, 10**12, key(1), collect=mf.Draws())


def test_draws_need_particles():
    import optax

    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.sgd(0.1))
    with pytest.raises(TypeError, match="keeps particles, and ParametricFlow has none"):
        solve(flow, collect=mf.Draws())


def test_run_needs_a_state_that_counts():
    with pytest.raises(TypeError, match="state has no `step`, got Cloud"):
        mf.run(PROBLEM, Langevin(0.1), Cloud(START), None, key(0), 3)


def test_a_state_of_another_flow_is_refused():
    state = solve(FLOWS["Langevin"], steps=2).state
    with pytest.raises((TypeError, ValueError), match="initial is a"):
        mf.solve(PROBLEM, mf.WassersteinFlow(1e-2), state, 3, key(0))


def test_nothing_is_undefined():
    """`jax_debug_nans` can be used: what is not defined is left out."""
    jax.config.update("jax_debug_nans", True)
    try:
        history = solve(mf.WassersteinFlow(1e-2, mf.RMSPreconditioner(10))).history
        assert "batch_noise" not in history
        batch = jax.random.normal(key(5), (32, 2))
        problem = mf.Problem(lambda theta, b: jnp.mean((theta[None] - b) ** 2), 1.0 * mf.KL(PRIOR))
        flow = mf.WassersteinFlow(1e-2, mf.RMSPreconditioner(10))
        history = mf.solve(problem, flow, START, 30, key(0), data=batch, batch_size=8).history
        assert np.isfinite(history.batch_noise).all()
        flat = mf.solve(mf.Problem(lambda theta: 0.0 * jnp.sum(theta)), flow, START, 3, key(0)).history
        assert (flat.repulsion == 0).all()
    finally:
        jax.config.update("jax_debug_nans", False)
