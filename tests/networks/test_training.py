"""BatchNorm and Dropout: statistics and keys of every particle, in training and in prediction."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import key
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
    return eqx.nn.make_with_state(Norm)(k)


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


def plain_flax(theta, statistics, steps, optimiser):
    """One network, trained as Flax's own guide has it."""
    module = Residual()

    def loss(theta, statistics, batch):
        logits, changed = module.apply(
            {"params": theta, "batch_stats": statistics}, batch[0], train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), changed[
            "batch_stats"
        ]

    @jax.jit
    def step(theta, statistics, memory, batch):
        gradient, statistics = jax.grad(loss, has_aux=True)(theta, statistics, batch)
        updates, memory = optimiser.update(gradient, memory, theta)
        return optax.apply_updates(theta, updates), statistics, memory

    memory = optimiser.init(theta)
    for batch in batches(steps):
        theta, statistics, memory = step(theta, statistics, memory, batch)
    return theta, statistics


def test_a_deep_ensemble_is_its_networks_trained_alone(residual):
    steps, optimiser = 12, optax.sgd(0.05, momentum=0.9)
    start = residual.sample(key(1), N)
    solution = mf.solve(
        problem_of(residual),
        mf.WassersteinFlow(optimiser=optimiser),
        start,
        steps,
        key(),
        data=batches(steps + 1),
    )
    particles = solution.measure.particles
    assert isinstance(particles, mf.WithStatistics)
    for i in range(N):
        begun = one(start, i)
        theta, statistics = plain_flax(begun.parameters, begun.statistics["batch_stats"], steps, optimiser)
        assert_same(one(particles.parameters, i), theta)
        assert_same(one(particles.statistics["batch_stats"], i), statistics)
    means = np.asarray(particles.statistics["batch_stats"]["BatchNorm_0"]["mean"])
    assert len(np.unique(means, axis=0)) == N, "every particle has its own"
