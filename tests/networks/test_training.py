"""BatchNorm and Dropout: statistics and keys of every particle, in training and in prediction."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import jit, key
from sklearn.datasets import load_digits

import measureflow as mf
from measureflow.networks.network import Network

pytestmark = pytest.mark.standard_promotion
N, BATCH = 3, 32
CLASSES = mf.likelihoods.Categorical(10)


class Residual(linen.Module):
    """A convolution, a residual block and a head, all with BatchNorm; Dropout where it is asked for."""

    width: int = 4
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train):
        def norm(y):
            return linen.BatchNorm(use_running_average=not train, momentum=0.9)(y)

        def conv(**options):
            return linen.Conv(self.width, (3, 3), use_bias=False, **options)

        x = linen.relu(norm(conv(strides=2)(x)))
        y = linen.relu(norm(conv()(x)))
        x = linen.relu(x + norm(conv()(y)))
        x = linen.Dropout(self.rate, deterministic=not train)(x)
        return linen.Dense(10)(x.reshape(x.shape[0], -1))


class Norm(eqx.Module):
    """One BatchNorm layer between two linear ones, with Dropout."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, k, rate=0.0):
        a, b = jax.random.split(k)
        self.first, self.last = eqx.nn.Linear(64, 8, key=a), eqx.nn.Linear(8, 10, key=b)
        self.norm = eqx.nn.BatchNorm(8, axis_name="cases", mode="batch")
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, state, key=None):
        x, state = self.norm(self.first(x.ravel()), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(64, 8, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x.reshape(x.shape[0], -1))))))


def make_equinox(k):
    return eqx.nn.make_with_state(Norm)(k, 0.5)


def linen_network(**options):
    return Network.linen(
        Residual(**options), DIGITS[0][:1], prediction={"train": False}, training={"train": True}
    )


def digits():
    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)


DIGITS = digits()
TRAIN, TEST = tuple(x[:480] for x in DIGITS), tuple(x[480:960] for x in DIGITS)


def problem_of(network, **weights):
    loss = mf.NegativeLogLikelihood(network, CLASSES)
    if not weights:
        return mf.deep_ensemble(loss)
    prior = network.prior()
    kernel = mf.SquaredExponential(10.0)
    return mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, **weights)


def batches(steps):
    """The batches that the run sees, one after the other: an iterator, so that a plain loop sees the same."""
    order = np.random.default_rng(0).permutation(len(TRAIN[0]))
    for step in range(steps):
        rows = order[step * BATCH % len(order) :][:BATCH]
        yield tuple(x[rows] for x in TRAIN)


def one(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def assert_same(found, expected, relative=2e-4):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=relative, atol=relative * float(np.max(np.abs(b))) + 1e-7)


@pytest.fixture(scope="module")
def residual():
    return linen_network()


def flax_loss(theta, statistics, batch):
    logits, changed = Residual().apply(
        {"params": theta, "batch_stats": statistics}, batch[0], train=True, mutable=["batch_stats"]
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
    return loss, changed["batch_stats"]


def plain_flax(theta, statistics, steps, optimiser):
    """One network, trained as Flax's own guide has it."""

    @jax.jit
    def step(theta, statistics, memory, batch):
        gradient, statistics = jax.grad(flax_loss, has_aux=True)(theta, statistics, batch)
        updates, memory = optimiser.update(gradient, memory, theta)
        return optax.apply_updates(theta, updates), statistics, memory

    memory = optimiser.init(theta)
    for batch in batches(steps):
        theta, statistics, memory = step(theta, statistics, memory, batch)
    return theta, statistics


def test_a_deep_ensemble_is_its_networks_trained_alone(residual):
    steps, optimiser = 12, optax.sgd(0.05, momentum=0.9)
    start, flow = residual.sample(key(1), N), mf.WassersteinFlow(optimiser=optimiser)
    solution = mf.solve(problem_of(residual), flow, start, steps, key(), data=batches(steps + 1))
    particles = solution.measure.particles
    assert isinstance(particles, mf.WithStatistics)
    for i in range(2):
        begun = one(start, i)
        theta, statistics = plain_flax(begun.parameters, begun.statistics["batch_stats"], steps, optimiser)
        assert_same(one(particles.parameters, i), theta)
        assert_same(one(particles.statistics["batch_stats"], i), statistics)
    means = np.asarray(particles.statistics["batch_stats"]["BatchNorm_0"]["mean"])
    assert len(np.unique(means, axis=0)) == N, "every particle has its own"


@pytest.mark.slow
def test_a_repulsive_langevin_ensemble_of_residual_networks(residual):
    """It learns; its last step has the statistics of Flax at the parameters before it, without noise; and it
    predicts with them."""
    problem, flow = problem_of(residual, mmd=1e-2, kl=1e-5), mf.WassersteinFlow(0.3)
    start = residual.sample(key(1), N).parameters  # without statistics, which start as Flax has them
    solution = mf.solve(problem, flow, start, 100, key(), data=TRAIN, batch_size=BATCH)
    batch = tuple(x[:BATCH] for x in TRAIN)
    before = solution.measure.particles
    after = mf.run(problem, flow, solution.state, batch, key(), 1).particles
    alone = jit(jax.vmap(lambda p: flax_loss(p.parameters, p.statistics["batch_stats"], batch)[1]))
    assert_same(after.statistics["batch_stats"], alone(before))
    moved = np.asarray(after.parameters["Dense_0"]["bias"] - before.parameters["Dense_0"]["bias"])
    assert np.all(np.abs(moved) > 0)
    predictive = mf.Predictive(residual, CLASSES, before)
    found = np.asarray(predictive(TEST[0]).probs)
    evaluate = jit(
        jax.vmap(lambda p: Residual().apply({"params": p.parameters, **p.statistics}, TEST[0], train=False))
    )
    logits = evaluate(before)
    np.testing.assert_allclose(found, np.mean(jax.nn.softmax(logits), axis=0), atol=2e-5)
    # 480 images, chance 0.1, and a standard error of 0.02.
    assert np.mean(np.argmax(found, axis=1) == TEST[1]) > 0.75
    assert solution.history.loss[-1] < 0.7 * solution.history.loss[0]


# --- small networks of each library

X = np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 10, 24).astype(np.int32)


class Small(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(8)(x))
        return linen.Dense(10)(linen.Dropout(self.rate, deterministic=not train)(linen.relu(x)))


def small_linen(**options):
    modes = {"prediction": {"train": False}, "training": {"train": True}} | options
    return Network.linen(Small(), X[:1], **modes)


SMALL = {
    "linen": small_linen,
    "equinox": lambda: Network.equinox(make_equinox, training=True),
    "nnx": lambda: Network.nnx(NnxNorm, training=True),
}


# What libraries differ in is small: one of them suffices in between.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "equinox")) for name in SMALL],
)
def trained(request):
    """A network of each library, and four steps of it."""
    network = SMALL[request.param]()
    problem, flow = problem_of(network), mf.WassersteinFlow(0.1)
    start = network.sample(key(1), N)
    solution = mf.solve(problem, flow, start, 4, key(), data=(X, Y), batch_size=12)
    return network, problem, flow, start, solution


def test_statistics_go_on_and_keys_differ(trained):
    """Particles that begin as one are told apart by Dropout; without a key, nothing is random."""
    network, problem, flow, start, solution = trained
    before, after = start.statistics, solution.measure.particles.statistics
    assert all(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))
    same = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * N), start)
    after_one = jit(lambda k: mf.run(problem, flow, flow.init(problem, same), (X, Y), k, 1).particles)
    twice = [after_one(key(i)) for i in (0, 1)]
    weights = np.stack([jax.tree.leaves(p.parameters)[0] for p in twice])
    assert len(np.unique(weights.reshape(2 * N, -1), axis=0)) == 2 * N, "keys by particle and by run"
    point = one(solution.measure.particles, 0)
    outputs = [jit(network.apply)(point, rows) for rows in (X, X[:5])]
    np.testing.assert_allclose(outputs[0][:5], outputs[1], rtol=2e-4, atol=1e-5)


def test_continuing_is_exact(trained, tmp_path):
    _, problem, flow, start, solution = trained
    options = {"data": (X, Y), "batch_size": 12}
    folder = mf.Checkpoint(tmp_path / "run", every=2)
    mf.solve(problem, flow, start, 2, key(), checkpoint=folder, record_every=1, **options)
    resumed = mf.solve(problem, flow, start, 4, key(), checkpoint=folder, record_every=1, **options)
    for a, b in zip(*map(jax.tree.leaves, (resumed.state, solution.state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_file_has_statistics(trained, tmp_path):
    network, _, _, _, solution = trained
    predictive = mf.Predictive(network, CLASSES, solution.measure.particles)
    mf.save(predictive, tmp_path / "model.mf")
    again = mf.load(tmp_path / "model.mf", network=network)
    np.testing.assert_array_equal(again(X).probs, predictive(X).probs)


def test_equinox_statistics_are_those_of_equinox():
    network = Network.equinox(make_equinox, training=True)
    module, state = make_equinox(key(3))
    point = one(network.start_from((module, state), key(), 1, noise=0.0), 0)
    _, after = jit(network.training)(point.parameters, point.statistics, X, key())
    on_rows = jax.vmap(
        lambda x, s: module(x, s, key=key()), in_axes=(0, None), out_axes=(0, None), axis_name="cases"
    )
    _, expected = jit(on_rows)(X, state)
    assert_same(after, jax.tree.leaves(expected))


def test_frozen_statistics_are_constants(trained):
    """Those of a trained particle, in a network whose θ is all that is left to learn."""
    point = one(trained[-1].measure.particles, 1)
    if isinstance(point.statistics, list):
        state = trained[0].apply.function.function.__self__._state(point.statistics)
        frozen = Network.equinox(lambda k: (eqx.nn.inference_mode(make_equinox(k)[0]), state))
    elif "batch_stats" in point.statistics:
        frozen = small_linen(training=None, variables=point.statistics)
    else:

        def make(rngs):
            module = NnxNorm(rngs)
            nnx.update(module, point.statistics)
            module.eval()
            return module

        frozen = Network.nnx(make)
    np.testing.assert_allclose(
        jit(frozen.apply)(point.parameters, X), jit(trained[0].apply)(point, X), rtol=1e-4, atol=1e-5
    )


# --- pretrained weights


def test_particles_start_about_pretrained_weights():
    network = small_linen()
    variables = Small().init(key(5), X, train=False)
    n = 400
    particles = network.start_from(variables, key(1), n, noise=0.1, new=["Dense_1"])
    kernel = variables["params"]["Dense_0"]["kernel"]
    size = 0.1 * float(jnp.sqrt(jnp.mean(kernel**2)))
    away = (particles.parameters["Dense_0"]["kernel"] - kernel[None]) / size
    assert abs(float(jnp.mean(away**2)) - 1) < 5 * np.sqrt(2 / away.size)
    for leaf, expected in zip(
        *map(jax.tree.leaves, (particles.statistics["batch_stats"], variables["batch_stats"])), strict=True
    ):
        np.testing.assert_array_equal(leaf, np.stack([expected] * n))
    heads = particles.parameters["Dense_1"]["kernel"]
    # Flax's own initialiser: variance 1/8, all particles different.
    assert abs(float(jnp.var(heads)) * 8 - 1) < 5 * np.sqrt(2 / heads.size)
    smaller = {"params": {k: v for k, v in variables["params"].items() if k != "Dense_1"}}
    with pytest.raises(ValueError, match=r"no array 'Dense_1.bias'.*new=\['Dense_1'\]"):
        Network.linen(Small(rate=0.0), X, prediction={"train": False}, variables=variables).start_from(
            smaller, key(), 3
        )


PLAIN = Network.mlp(3, (4,), 2)
THETA = [{"weight": np.ones((3, 4)), "bias": np.zeros(4)}, {"weight": np.ones((4, 2)), "bias": np.zeros(2)}]


@functools.cache
def stateful():
    """Made when a test asks for it, and not where tests are collected."""
    network = small_linen()
    loss = mf.NegativeLogLikelihood(network, CLASSES)
    return network, loss, 1.0 * mf.KL(network.prior()), jit(lambda k: network.sample(k, 2))(key())


def solved(flow, problem=None):
    def act():
        _, loss, divergence, start = stateful()
        stated = (problem or mf.Problem)(loss, divergence)
        return mf.solve(stated, flow(), start, 1, key(), data=(X, Y))

    return act


MISTAKES = {
    "no noise": (lambda: PLAIN.start_from(THETA, key(), 2, noise=0.0), ["noise is 0", "noise=0.1", "new="]),
    "noise": (lambda: PLAIN.start_from(THETA, key(), 2, noise=-1.0), ["noise", "-1.0"]),
    "shape": (
        lambda: PLAIN.start_from([THETA[0], {**THETA[1], "weight": np.ones((4, 3))}], key(), 2),
        ["(4, 3)", "'1.weight'", "(4, 2)", "new="],
    ),
    "new": (lambda: PLAIN.start_from(THETA, key(), 2, new=["head"]), ["'head'", "0.weight"]),
    "new, a text": (lambda: PLAIN.start_from(THETA, key(), 2, new="head"), ["new", "sequence"]),
    "kinetic": (solved(lambda: mf.KineticFlow(0.1, 1.0)), ["KineticFlow", "WassersteinFlow", "GroupNorm"]),
    "stein": (
        solved(lambda: mf.SteinFlow(mf.SquaredExponential(1.0), 0.1)),
        ["SteinFlow", "WassersteinFlow"],
    ),
    "birth and death": (solved(lambda: mf.BirthDeath(mf.WassersteinFlow(0.1), 0.1)), ["BirthDeath", "carry"]),
    "metropolis": (solved(lambda: mf.WassersteinFlow(0.1, metropolis=True)), ["metropolis", "statistics"]),
    "sample": (
        lambda: mf.sample(mf.Problem(*stateful()[1:3]), stateful()[3], key(), data=(X, Y)),
        ["statistics"],
    ),
    "log score": (
        solved(lambda: mf.WassersteinFlow(0.1), lambda loss, kl: mf.Problem(mf.LogScore(loss), kl)),
        ["log score", "Problem(loss, regulariser)"],
    ),
    "between functions": (
        lambda: stateful()[0].at(X)(stateful()[3].parameters),
        ["WithStatistics", "between functions"],
    ),
    "parameters alone": (
        lambda: stateful()[1](stateful()[3].parameters, (X, Y)),
        ["WithStatistics", "solution.measure"],
    ),
    "other loss": (
        solved(
            lambda: mf.WassersteinFlow(0.1), lambda loss, kl: mf.Problem(lambda theta, batch: jnp.zeros(()))
        ),
        ["carries none", "initial.parameters"],
    ),
    "with constants": (lambda: stateful()[0].with_constants(1), ["with_constants", "training"]),
    "precision": (lambda: stateful()[0].computed_in(jnp.bfloat16), ["computed_in", "training"]),
    "counts": (lambda: mf.Training(lambda *given: given, jnp.arange(2)), ["int32", "floats"]),
    "median": (lambda: mf.median_heuristic(stateful()[3]), ["particles.parameters"]),
    "nothing to train": (
        lambda: Network.equinox(lambda k: eqx.nn.Linear(3, 2, key=k), training=True),
        ["leave"],
    ),
    "linen, in training": (lambda: small_linen(training=None), ["batch_stats", "variables=", "training="]),
    "linen, changes": (
        lambda: small_linen(prediction={"train": True}, training=None, variables={"batch_stats": {}}),
        ["variables", "batch_stats"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name):
    act, pieces = MISTAKES[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        act()
    for piece in pieces:
        assert piece in str(caught.value), f"{piece!r} not in: {caught.value}"
