"""The compiled loop: exact continuation, no recompilation, data, history."""

import io
import pickle
from contextlib import redirect_stderr

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import measureflow as mf

KEY = jax.random.key(0)
PRIOR = mf.Gaussian({"w": jnp.zeros(2), "b": jnp.zeros(())}, 1.0)
START = PRIOR.sample(jax.random.key(1), 12)
X = jax.random.normal(jax.random.key(2), (53, 2))
Y = X @ jnp.array([1.0, -2.0]) + 0.5
DATA = (X, Y)


def regression_loss(theta, batch):
    x, y = batch
    return jnp.mean((x @ theta["w"] + theta["b"] - y) ** 2)


def drle(kl=0.1, mmd=0.3, lengthscale=1.0, loss=regression_loss):
    kernel = mf.SquaredExponential(lengthscale)
    return mf.deep_repulsive_langevin_ensemble(loss, PRIOR, kernel, mmd=mmd, kl=kl)


@eqx.filter_jit
def step(problem, flow, state, batch):
    return flow.step(problem, state, batch, KEY)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


FLOWS = {
    "constant": (drle(), mf.WassersteinFlow(1e-2)),
    "schedule": (drle(), mf.WassersteinFlow(optax.cosine_decay_schedule(1e-2, 700))),
    "preconditioned": (
        drle(),
        mf.WassersteinFlow(1e-2, preconditioner=mf.RMSPreconditioner(adapt_steps=40)),
    ),
    "momentum": (drle(), mf.WassersteinFlow(optax.cosine_decay_schedule(1e-2, 700), momentum=0.5)),
    "optimiser": (mf.deep_ensemble(regression_loss), mf.WassersteinFlow(optimiser=optax.adam(1e-2))),
    "parametric": (
        drle(),
        mf.ParametricFlow(mf.FullRankGaussian(), optax.adam(1e-2), samples=8),
    ),
}
# Without batches, one flow with noise and one without stand for all.
WITHOUT_BATCHES = ("constant", "optimiser")


@pytest.mark.standard_promotion
def test_steps_in_blocks_are_the_same_steps(monkeypatch):
    """As on a GPU, with a number of steps that is data, and one that is part of the program."""
    problem, flow = FLOWS["schedule"]
    state = flow.init(problem, START)

    def after(steps):
        return mf.run(problem, flow, state, DATA, KEY, steps, batch_size=10)

    numbers = (0, 5, 10, 37)
    one_by_one = jax.jit(lambda steps: after(steps))
    expected = [one_by_one(steps) for steps in numbers]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    in_blocks = jax.jit(lambda steps: after(steps))
    found = [in_blocks(steps) for steps in numbers]
    for state_found, state_expected, steps in zip(
        [*found, jax.jit(lambda: after(37))()], [*expected, expected[-1]], [*numbers, 37], strict=True
    ):
        assert state_found.step == steps
        # The same operations, which the compiler may round otherwise: some units in the last place.
        np.testing.assert_allclose(state_found.particles["w"], state_expected.particles["w"], rtol=1e-6)


def test_a_run_of_less_than_no_steps_is_refused():
    problem, flow = FLOWS["constant"]
    with pytest.raises(ValueError, match="steps must be at least 0, got -3; it counts the steps"):
        mf.run(problem, flow, flow.init(problem, START), DATA, KEY, -3)


@pytest.mark.few(3)
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        pytest.param(name, size, marks=[pytest.mark.slow] * (size is None and name not in WITHOUT_BATCHES))
        for size in (None, 10)
        for name in FLOWS
    ],
)
def test_continuing_equals_one_run_of_the_sum_bit_for_bit(name, batch_size):
    problem, flow = FLOWS[name]
    settings = {"data": DATA, "batch_size": batch_size}
    whole = mf.solve(problem, flow, START, 97, KEY, **settings)
    part = mf.solve(problem, flow, START, 33, KEY, **settings)
    rest = mf.solve(problem, flow, part.state, 64, KEY, **settings)
    assert int(rest.state.step) == 97
    assert equal(whole.state, rest.state)
    again = mf.solve(problem, flow, START, 97, KEY, **settings, record_every=7)
    assert equal(whole.state, again.state)
    other = mf.solve(problem, flow, START, 97, jax.random.key(9), **settings)
    # Without noise or batches, the key has nothing to decide.
    assert equal(whole.state, other.state) == (name == "optimiser" and batch_size is None)


class Counted(eqx.Module):
    """A loss with an array inside, that counts how often it is traced."""

    shift: jax.Array
    count: list = eqx.field(static=True)

    def __call__(self, theta, batch):
        self.count[0] += 1
        return regression_loss(theta, batch) + 0.0 * self.shift


class Count(list):
    """Static fields are compared: a counter equals itself whatever it has counted."""

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


@pytest.mark.standard_promotion
def test_new_numbers_compile_nothing():
    count = Count([0])

    def solve(kl, mmd, lengthscale, step_size, steps, data, key, shift=0.0):
        problem = drle(kl, mmd, lengthscale, loss=Counted(jnp.asarray(shift), count))
        flow = mf.WassersteinFlow(step_size)
        return mf.solve(problem, flow, START, steps, key, data=data, batch_size=10)

    solve(0.1, 0.3, 1.0, 1e-2, 40, DATA, KEY)
    solve(0.1, 0.3, 1.0, optax.constant_schedule(1e-2), 40, DATA, KEY)
    traces = count[0]
    assert traces > 0
    solve(0.2, 0.4, 2.0, 3e-3, 1_234, (2 * X, Y + 1), jax.random.key(5), shift=1.0)
    solve(jnp.asarray(0.2), np.float64(0.4), np.float32(2), jnp.float32(1e-3), 7, DATA, KEY)
    solve(0.2, 1, 1, optax.cosine_decay_schedule(1e-2, 500), 77, DATA, KEY)
    solve(0.2, 1, 1, lambda step: 1e-3 / (1 + step), 60, DATA, KEY)
    assert count[0] == traces


def test_a_run_under_vmap_is_the_loop():
    flow = mf.WassersteinFlow(1e-2)
    weights, keys = jnp.array([0.05, 0.1, 0.4]), jax.random.split(KEY, 3)
    data = (jnp.stack([X, X + 1, 2 * X]), jnp.stack([Y, Y, -Y]))

    def one(kl, key, data):
        problem = drle(kl=kl, mmd=2 * kl)
        return mf.run(problem, flow, flow.init(problem, START), data, key, 60, batch_size=10).particles

    together = jax.jit(jax.vmap(one))(weights, keys, data)
    for i in range(3):
        alone = mf.solve(
            drle(kl=weights[i], mmd=2 * weights[i]),
            flow,
            START,
            60,
            keys[i],
            data=jax.tree.map(lambda leaf, i=i: leaf[i], data),
            batch_size=10,
        ).measure.particles
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5)


def test_an_epoch_visits_every_case_once_and_drops_the_remainder():
    """With gradient = the batch's mean, the sum of all moves in an epoch shows which cases were seen."""
    cases = jnp.eye(53)[:, :, None]
    problem = mf.deep_ensemble(lambda theta, batch: jnp.sum(theta * jnp.mean(batch[0], axis=0)))
    seen = []
    for key in (KEY, jax.random.key(1)):
        state = mf.WassersteinFlow(1.0).init(problem, jnp.zeros((1, 53, 1)))
        for _ in range(2):
            before = state.particles
            state = mf.solve(
                problem, mf.WassersteinFlow(1.0), state, 5, key, data=(cases,), batch_size=10
            ).state
            visits = np.asarray((before - state.particles) * 10)[0, :, 0]
            assert np.allclose(np.sort(visits), [0.0] * 3 + [1.0] * 50, atol=1e-5)
            seen.append(tuple(np.flatnonzero(visits < 0.5)))
    assert len(set(seen)) > 1  # a fresh permutation each epoch


def test_an_iterator_of_batches_is_used_in_order():
    batches = [(X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10)]
    problem, flow = drle(), mf.WassersteinFlow(1e-2)
    state = flow.init(problem, START)
    for i in range(150):
        state = step(problem, flow, state, batches[i % 4])
    # A loader starts over at its end; a generator goes on.
    loader = mf.solve(problem, flow, START, 150, KEY, data=Loader(batches))
    endless = (batches[i % 4] for i in range(10**9))
    generator = mf.solve(problem, flow, START, 70, KEY, data=endless)
    # As many batches are used up as steps are taken, so the same generator can go on.
    generator = mf.solve(problem, flow, generator.state, 80, KEY, data=endless)
    assert equal(loader.state, generator.state)
    for a, b in zip(jax.tree.leaves(loader.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Loader:
    """What a PyTorch or Grain loader looks like: it can be iterated over again."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_an_iterator_that_ends_keeps_what_was_computed():
    batches = iter([(X, Y)] * 100)
    with pytest.raises(mf.DataExhaustedError, match="iterator of batches ended") as caught:
        mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 200, KEY, data=batches)
    assert int(caught.value.state.step) == 100
    straight = mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 100, KEY, data=iter([(X, Y)] * 100))
    assert equal(caught.value.state, straight.state)


def test_history_says_what_happened():
    problem, flow = drle(), mf.WassersteinFlow(1e-2)
    solution = mf.solve(problem, flow, START, 10_007, KEY, data=DATA)
    history = solution.history
    assert history.step[0] == 0
    assert history.step[-1] == 10_007
    assert len(history.step) == 1002
    assert np.all(np.diff(history.step) > 0)
    state = flow.init(problem, START)
    for _ in range(20):
        state = step(problem, flow, state, DATA)
    row = {name: column[history.step == 20][0] for name, column in history.items()}
    particles = state.particles
    of_loss = jax.vmap(jax.grad(regression_loss), in_axes=(0, None))(particles, DATA)
    total = problem.wasserstein_gradient(particles, DATA)

    def norm(field):
        return np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(field)) / 12)

    flat = np.concatenate([np.asarray(particles["b"])[:, None], np.asarray(particles["w"])], axis=1)
    squares = ((flat[:, None] - flat[None]) ** 2).sum(-1)
    kernel = np.exp(-squares / 2)
    repulsion = 0.6 * np.mean(-kernel[..., None] * (flat[:, None] - flat[None]), axis=1)
    assert row["loss"] == pytest.approx(
        float(jnp.mean(jax.vmap(regression_loss, in_axes=(0, None))(particles, DATA))), rel=1e-4
    )
    assert row["loss_gradient_norm"] == pytest.approx(norm(of_loss), rel=1e-4)
    assert row["gradient_norm"] == pytest.approx(norm(total), rel=1e-4)
    assert row["interaction"] == pytest.approx(0.3 * kernel.mean(), rel=1e-4)
    assert row["repulsion"] == pytest.approx(np.sqrt((repulsion**2).sum(1).mean()) / norm(of_loss), rel=1e-3)
    with pytest.raises(AttributeError, match="history has no 'losss'"):
        _ = history.losss


@pytest.mark.few(1)
@pytest.mark.parametrize("g", [None, 4.0])
def test_batch_noise_is_the_heat_that_batches_add(g):
    """For ℓ = ½(θ − x)² the batch gradient has variance S/b (1 − b/n): known exactly."""
    n, b, eta, tau = 64, 16, 1e-2, 0.05
    x = jax.random.normal(jax.random.key(3), (n,))
    problem = mf.deep_langevin_ensemble(lambda t, batch: 0.5 * jnp.mean((t - batch) ** 2), mf.Flat(), kl=tau)
    preconditioner = None if g is None else mf.FixedPreconditioner(g)
    flow = mf.WassersteinFlow(eta, preconditioner=preconditioner)
    solution = mf.solve(problem, flow, jnp.zeros(4), 4_000, KEY, data=x, batch_size=b, record_every=1)
    covariance = np.var(np.asarray(x), ddof=1) / b * (1 - b / n)
    expected = eta * (g or 1.0) * covariance / (2 * tau)
    measured = solution.history.batch_noise
    standard_error = measured.std(ddof=1) / np.sqrt(len(measured))
    assert abs(measured.mean() - expected) < 4 * standard_error
    assert standard_error < 0.05 * expected
    for whole in ({"batch_size": n}, {}):
        assert np.all(
            mf.solve(problem, flow, jnp.zeros(4), 10, KEY, data=x, **whole).history.batch_noise == 0
        )


@pytest.mark.standard_promotion
def test_an_optimiser_moves_every_particle_on_its_own():
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    problem = mf.deep_ensemble(regression_loss)
    flow = mf.WassersteinFlow(optimiser=optimiser)
    together = mf.solve(problem, flow, START, 50, KEY, data=DATA).measure.particles
    theta = jax.tree.map(lambda leaf: leaf[3], START)
    memory = optimiser.init(theta)
    for _ in range(50):
        updates, memory = optimiser.update(jax.grad(regression_loss)(theta, DATA), memory, theta)
        theta = optax.apply_updates(theta, updates)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(theta), strict=True):
        np.testing.assert_allclose(a[3], b, rtol=1e-4, atol=1e-6)


def test_divergence_names_the_step_and_keeps_the_last_finite_state():
    problem = mf.deep_ensemble(mf.theory.quartic_loss)
    initial = jnp.array([[-2.0], [30.0], [1.0], [40.0]])
    flow = mf.WassersteinFlow(0.05)
    with pytest.raises(mf.DivergenceError, match=r"2 of 4 particles .* smaller step_size") as caught:
        mf.solve(problem, flow, initial, 500, KEY)
    error = caught.value
    state = flow.init(problem, initial)
    while np.all(np.isfinite((after := step(problem, flow, state, None)).particles)):
        state = after
    assert error.step == int(state.step) + 1
    np.testing.assert_allclose(error.state.particles, state.particles, rtol=1e-5)
    assert set(error.lost) <= {1, 3}
    assert len(error.history.step) > 0


def test_progress_shows_rate_time_left_and_loss():
    screen = io.StringIO()
    with redirect_stderr(screen):
        quiet = mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 300, KEY, data=DATA)
        assert screen.getvalue() == ""
        shown = mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 300, KEY, data=DATA, progress=True)
    assert "300/300" in screen.getvalue()
    assert "step/s" in screen.getvalue()
    assert "loss=" in screen.getvalue()
    assert equal(quiet.state, shown.state)
    with redirect_stderr(named := io.StringIO()):
        mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 300, KEY, data=DATA, progress="DRLE on a line")
    assert "DRLE on a line: " in named.getvalue()


def test_no_steps_return_the_beginning():
    solution = mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 0, KEY, data=DATA)
    assert equal(solution.measure.particles, START)
    assert list(solution.history.step) == [0]


@pytest.mark.standard_promotion
def test_a_state_is_continued_by_its_own_flow_and_problem_only():
    optimised = mf.WassersteinFlow(optimiser=optax.sgd(0.1))
    state = mf.solve(mf.deep_ensemble(regression_loss), optimised, START, 3, KEY, data=DATA).state
    with pytest.raises(ValueError, match="not Langevin"):
        mf.solve(drle(), optimised, state, 3, KEY, data=DATA)
    with pytest.raises(ValueError, match="not Langevin"):
        mf.run(drle(), optimised, state, DATA, KEY, 3)
    preconditioned = mf.WassersteinFlow(1e-2, preconditioner=mf.RMSPreconditioner(5))
    with pytest.raises(ValueError, match="state of another flow or problem"):
        mf.solve(drle(), preconditioned, state, 3, KEY, data=DATA)
    parametric = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(1e-2))
    with pytest.raises(TypeError, match="ParametricFlow cannot continue from"):
        mf.solve(drle(), parametric, state, 3, KEY, data=DATA)


def test_errors_travel_between_processes():
    with pytest.raises(mf.DivergenceError) as caught:
        mf.solve(
            mf.deep_ensemble(mf.theory.quartic_loss), mf.WassersteinFlow(1.0), jnp.full((2, 1), 9.0), 50, KEY
        )
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert error.step == caught.value.step
    assert equal(error.state, caught.value.state)


@pytest.mark.standard_promotion
def test_divergence_of_a_parametric_flow_speaks_of_its_parameters():
    flow = mf.ParametricFlow(mf.MeanFieldGaussian(), optax.sgd(10.0), samples=4)
    with pytest.raises(
        mf.DivergenceError, match="parameters became NaN or infinite; try a smaller learning rate"
    ):
        mf.solve(mf.deep_ensemble(mf.theory.quartic_loss), flow, mf.Gaussian(jnp.full(1, 9.0), 1.0), 50, KEY)


def test_ragged_batches_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"different shapes, got .*drop_last=True"):
        mf.solve(drle(), mf.WassersteinFlow(1e-2), START, 9, KEY, data=Loader([(X, Y), (X[:3], Y[:3])]))


@pytest.mark.parametrize("scale", [2.0, {"w": 2.0, "b": 2.0}, {"w": jnp.full(2, 2.0), "b": jnp.array(2.0)}])
def test_a_constant_preconditioner_may_be_a_number_or_a_pytree(scale):
    flow = mf.WassersteinFlow(1e-2, preconditioner=mf.FixedPreconditioner(scale))
    state = step(drle(), flow, flow.init(drle(), START), DATA)
    # For a scalar g it is the plain flow with step size ηg.
    plain = mf.WassersteinFlow(2e-2)
    expected = step(drle(), plain, plain.init(drle(), START), DATA)
    for a, b in zip(jax.tree.leaves(state.particles), jax.tree.leaves(expected.particles), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="FixedPreconditioner scale has shapes"):
        mf.WassersteinFlow(1e-2, preconditioner=mf.FixedPreconditioner(jnp.ones(3))).init(drle(), START)


@pytest.mark.standard_promotion
def test_precision_is_that_of_the_particles():
    with jax.enable_x64(True):
        prior = mf.Gaussian(jnp.zeros(2, jnp.float32), 1.0)
        assert prior.sample(KEY, 3).dtype == jnp.float32
        problem = mf.deep_langevin_ensemble(lambda theta: jnp.sum(theta**2), prior, kl=0.1)
        flow = mf.WassersteinFlow(1e-2, preconditioner=mf.FixedPreconditioner(2.0))
        for dtype in (jnp.float32, jnp.bfloat16):
            end = mf.run(problem, flow, flow.init(problem, jnp.ones((3, 2), dtype)), None, KEY, 5)
            assert end.particles.dtype == dtype


@jax.tree_util.register_pytree_node_class
class Pair:
    """A pytree that does not know equality."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    def tree_flatten(self):
        return (self.first, self.second), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_any_pytree_will_do():
    prior = mf.Gaussian(Pair(jnp.zeros(2), jnp.zeros(())), 1.0)
    problem = mf.deep_langevin_ensemble(lambda t: jnp.sum(t.first**2) + t.second**2, prior, kl=1.0)
    solution = mf.solve(problem, mf.WassersteinFlow(1e-2), prior.sample(KEY, 4), 3, KEY)
    assert solution.measure.particles.first.shape == (4, 2)
