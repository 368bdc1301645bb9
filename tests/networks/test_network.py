"""Networks as functions of θ: one function by many routes, its initial law, its prior, its repulsion."""

import ast
import copy
import itertools
import pickle
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.stats as st
from flax import linen, nnx
from helpers import assert_close, assert_within, jit, key
from scipy.special import expit

import measureflow as mf
from measureflow.networks import network as network_module
from measureflow.networks.network import Network

SIZES = (3, 5, 5, 2)
PAIRS = list(itertools.pairwise(SIZES))
RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=pair).astype(np.float32) for pair in PAIRS]
BIASES = [RNG.normal(size=size).astype(np.float32) for size in SIZES[1:]]
INPUTS = RNG.normal(size=(7, 3)).astype(np.float32)


def forward(xp, weights, biases, x):
    """tanh between layers, in NumPy or jax.numpy."""
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = xp.tanh(x @ weight + bias[None])
    return x @ weights[-1] + biases[-1][None]


def plain_init(k):
    return [*[jax.random.normal(k, x.shape) for x in WEIGHTS], *[jnp.zeros(x.shape) for x in BIASES]]


def plain_apply(theta, x):
    return forward(jnp, theta[:3], theta[3:], x)


def make_equinox(k):
    return eqx.nn.MLP(3, 2, 5, 2, jnp.tanh, key=k)


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in SIZES[1:-1]:
            x = jnp.tanh(linen.Dense(width)(x))
        return linen.Dense(SIZES[-1])(x)


class NnxStack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in PAIRS])
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.dropout(jnp.tanh(layer(x)))
        return self.layers[-1](x)


class Odd(eqx.Module):
    """Not parameters: a static function made afresh, and integers that steer the call."""

    layers: list
    activation: object = eqx.field(static=True)
    hidden: jax.Array

    def __init__(self, k):
        keys = jax.random.split(k, 3)
        self.layers = [eqx.nn.Linear(a, b, key=k) for k, (a, b) in zip(keys, PAIRS, strict=True)]
        self.activation = lambda x: jnp.tanh(x)
        self.hidden = jnp.arange(2)

    def __call__(self, x):
        for layer in self.layers[: self.hidden.size]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def transposed(theta):
    """θ of Equinox layers with the weights above."""

    def places(tree):
        return [leaf for layer in tree.layers for leaf in (layer.weight, layer.bias)]

    pairs = zip(WEIGHTS, BIASES, strict=True)
    return eqx.tree_at(places, theta, [jnp.asarray(x) for w, b in pairs for x in (w.T, b)])


LAYERS = [{"weight": jnp.asarray(w), "bias": jnp.asarray(b)} for w, b in zip(WEIGHTS, BIASES, strict=True)]
FLAX = [{"kernel": layer["weight"], "bias": layer["bias"]} for layer in LAYERS]
FLAX_ONE = {"kernel": jnp.asarray(WEIGHTS[0][:, :2]), "bias": jnp.zeros(2)}
# A list, which Python cannot hash.
SEQUENTIAL = [linen.Dense(5), linen.tanh, linen.Dense(5), linen.tanh, linen.Dense(2)]

# name: (the network, its θ with the weights above)
ROUTES = {
    "mlp": (lambda: Network.mlp(3, (5, 5), 2, "tanh"), lambda theta: LAYERS),
    "plain": (
        lambda: Network(plain_init, plain_apply),
        lambda theta: [*map(jnp.asarray, WEIGHTS + BIASES)],
    ),
    "equinox": (lambda: Network.equinox(make_equinox), transposed),
    "equinox, odd": (lambda: Network.equinox(Odd), transposed),
    "linen": (
        lambda: Network.linen(LinenStack(), INPUTS[:1]),
        lambda theta: {f"Dense_{i}": layer for i, layer in enumerate(FLAX)},
    ),
    "linen.Sequential": (
        lambda: Network.linen(linen.Sequential(SEQUENTIAL), INPUTS[:1]),
        lambda theta: {f"layers_{2 * i}": layer for i, layer in enumerate(FLAX)},
    ),
    "nnx": (lambda: Network.nnx(NnxStack), lambda theta: {"layers": dict(enumerate(FLAX))}),
}


@pytest.fixture(scope="module")
def networks():
    return {name: make() for name, (make, _) in ROUTES.items()}


@pytest.mark.parametrize("name", ROUTES)
def test_all_routes_are_one_function(name, networks):
    network = networks[name]
    theta = ROUTES[name][1](jax.eval_shape(network.init, key()))
    exact = forward(np, *([x.astype(np.float64) for x in xs] for xs in (WEIGHTS, BIASES)), INPUTS)
    assert_close(network.apply(theta, INPUTS), exact)
    assert_close(network.apply(theta, jnp.asarray(INPUTS[2:3])), exact[2:3])
    slope = jit(jax.grad(lambda t: jnp.sum(network.apply(t, INPUTS))))(theta)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(slope)), "θ is all that there is to learn"
    assert sum(leaf.size for leaf in jax.tree.leaves(slope)) == 20 + 30 + 12


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ROUTES)
def test_particles_are_draws_of_the_initialiser(name, networks):
    network = networks[name]
    particles, draws = jit(lambda k: (network.sample(k, 3), jax.vmap(network.init)(jax.random.split(k, 3))))(
        key(3)
    )
    for leaf, expected in zip(*map(jax.tree.leaves, (particles, draws)), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, atol=1e-7)
    weights = [leaf for leaf in jax.tree.leaves(particles) if leaf.ndim == 3]
    assert len(weights) == 3
    assert all(len(np.unique(leaf)) == leaf.size for leaf in weights)
    # Particles, θ and the prior are on one space.
    assert jax.eval_shape(jax.vmap(network.at(INPUTS)), particles).shape == (3, 7, 2)
    problem = mf.Problem(lambda theta: jnp.zeros(()), 1.0 * mf.KL(network.prior()))
    assert mf.WassersteinFlow(0.1).init(problem, particles).step == 0


@pytest.mark.parametrize("name", ROUTES)
def test_networks_made_twice_are_one_program(name):
    traces = []

    @eqx.filter_jit
    def evaluate(features, theta):
        traces.append(1)
        return features(theta)

    make, with_weights = ROUTES[name]
    network, again = make(), make()
    theta = with_weights(jax.eval_shape(network.init, key()))
    first = evaluate(network.at(INPUTS), theta)
    for other in (again, copy.deepcopy(network)):
        np.testing.assert_array_equal(evaluate(other.at(INPUTS), theta), first)
    assert np.any(evaluate(again.at(INPUTS + 1), theta) != first)
    assert len(traces) == 1


def test_other_arguments_are_other_programs():
    evaluate = eqx.filter_jit(lambda network, theta: network.apply(theta, INPUTS))
    tanh, relu = (evaluate(Network.mlp(3, (5, 5), 2, name), LAYERS) for name in ("tanh", "relu"))
    assert np.any(tanh != relu)
    dense, wider = (Network.linen(linen.Dense(width), INPUTS) for width in (2, 3))
    assert evaluate(dense, FLAX_ONE).shape == (7, 2)
    assert dense.apply != wider.apply


def make_linear(k):
    return eqx.nn.Linear(3, 2, key=k)


# name: a network whose functions pickle, and its θ
PICKLES = {
    "mlp": (lambda: Network.mlp(3, (5, 5), 2, "tanh"), LAYERS),
    "plain": (lambda: Network(plain_init, plain_apply), [*map(jnp.asarray, WEIGHTS + BIASES)]),
    "equinox": (lambda: Network.equinox(make_linear), eqx.filter(make_linear(key()), eqx.is_inexact_array)),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickle(name):
    network, theta = PICKLES[name][0](), PICKLES[name][1]
    wider = network.with_constants(2)
    back, wider_back = pickle.loads(pickle.dumps((network, wider)))
    np.testing.assert_array_equal(back.apply(theta, INPUTS), network.apply(theta, INPUTS))
    assert jax.tree.structure(back) == jax.tree.structure(network)
    assert back.output_axis == network.output_axis
    theta = {"network": theta, "constants": jnp.ones(2)}
    np.testing.assert_array_equal(wider_back.apply(theta, INPUTS), wider.apply(theta, INPUTS))
    assert jax.eval_shape(wider_back.init, key()) == jax.eval_shape(wider.init, key())


# --- the multilayer perceptron


def test_perceptron_begins_where_he_says():
    """Weights N(0, 2/in), all independent: of all layers and particles; biases at 0."""
    n = 400
    theta = jit(lambda k: Network.mlp(2, (8, 3), 2).sample(k, n))(key(1))
    assert [jax.tree.map(jnp.shape, layer) for layer in theta] == [
        {"weight": (n, a, b), "bias": (n, b)} for a, b in ((2, 8), (8, 3), (3, 2))
    ]
    assert all(not np.any(layer["bias"]) for layer in theta)
    inputs = zip(theta, (2, 8, 3), strict=True)
    white = [np.asarray(layer["weight"]).reshape(n, -1) * np.sqrt(a / 2) for layer, a in inputs]
    for x in white:
        assert_within(np.mean(x**2), 1.0, np.sqrt(2 / x.size))
        assert st.kstest(x.ravel(), "norm").pvalue > 1e-4
    together = np.concatenate(white, axis=1)
    correlation = np.corrcoef(together.T)[np.triu_indices(together.shape[1], 1)]
    assert_within(correlation, 0.0, 1 / np.sqrt(n))


def test_perceptron_without_hidden_layers_is_linear():
    network = Network.mlp(3, (), 2)
    theta = [{"weight": jnp.asarray(WEIGHTS[0][:, :2]), "bias": jnp.array([1.0, -2.0])}]
    assert_close(network.apply(theta, INPUTS), INPUTS @ WEIGHTS[0][:, :2] + np.array([[1.0, -2.0]]))
    assert jax.tree.map(jnp.shape, jax.eval_shape(network.init, key())) == jax.tree.map(jnp.shape, theta)


SELU = (1.0507009873554805, 1.6732632423543772)
ACTIVATIONS = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "identity": lambda x: x,
    "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "relu": lambda x: np.maximum(x, 0),
    "selu": lambda x: SELU[0] * np.where(x > 0, x, SELU[1] * np.expm1(x)),
    "sigmoid": expit,
    "silu": lambda x: x * expit(x),
    "sin": np.sin,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    network = Network.mlp(1, (1,), 1, name)
    one = {"weight": jnp.ones((1, 1)), "bias": jnp.zeros(1)}
    x = np.linspace(-3, 3, 12, dtype=np.float32)[:, None]
    # Between layers only: the outputs are left as they are.
    theta = [one, {"weight": jnp.full((1, 1), -2.0), "bias": jnp.ones(1)}]
    assert_close(network.apply(theta, x), 1 - 2 * ACTIVATIONS[name](x.astype(np.float64)), relative=1e-4)


# --- the prior


class Convolutions(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(6, (3, 2), bias_init=linen.initializers.constant(0.3))(x)
        x = linen.LayerNorm()(x)
        x = linen.Conv(8, (2, 2), feature_group_count=2)(x)
        slope = self.param("slope", linen.initializers.constant(0.25), ())
        return slope * linen.Dense(5, use_bias=False)(x.reshape(x.shape[0], -1))


def make_convolutions(k):
    a, b, c = jax.random.split(k, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(4, 6, (3, 2), key=a),
            eqx.nn.GroupNorm(2, 6),
            eqx.nn.PReLU(),
            eqx.nn.Conv2d(6, 8, 2, groups=2, key=b),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(24, 5, key=c),
        ]
    )


# name: (the network, its parameters' names with mean and variance; weight = 3, bias = 0.5)
PRIORS = {
    "mlp": (
        lambda: Network.mlp(4, (7,), 2),
        {
            "[0]['bias']": (0, 0.25),
            "[0]['weight']": (0, 9 / 4),
            "[1]['bias']": (0, 0.25),
            "[1]['weight']": (0, 9 / 7),
        },
    ),
    "plain (out, in)": (
        lambda: Network(
            lambda k: (jax.random.normal(k, (4, 7)), jnp.arange(4.0)), lambda t, x: x @ t[0].T + t[1], 0
        ),
        {"[0]": (0, 9 / 7), "[1]": (np.arange(4.0), 0.25)},
    ),
    "one matrix": (lambda: Network(lambda k: jnp.ones((4, 7)), lambda t, x: x @ t), {"": (0, 9 / 4)}),
    "linen convolutions": (
        lambda: Network.linen(Convolutions(), jnp.ones((1, 3, 3, 4))),
        {
            "['Conv_0']['bias']": (np.float32(0.3), 0.25),
            "['Conv_0']['kernel']": (0, 9 / (3 * 2 * 4)),
            "['Conv_1']['bias']": (0, 0.25),
            "['Conv_1']['kernel']": (0, 9 / (2 * 2 * 3)),
            "['Dense_0']['kernel']": (0, 9 / (3 * 3 * 8)),
            "['LayerNorm_0']['bias']": (0, 0.25),
            "['LayerNorm_0']['scale']": (1, 0.25),
            "['slope']": (0.25, 0.25),
        },
    ),
    "equinox convolutions": (
        lambda: Network.equinox(make_convolutions),
        {
            ".layers[0].bias": (0, 0.25),  # shape (6, 1, 1), and random at the start
            ".layers[0].weight": (0, 9 / (4 * 3 * 2)),
            ".layers[1].bias": (0, 0.25),
            ".layers[1].weight": (1, 0.25),
            ".layers[2].negative_slope": (0.25, 0.25),
            ".layers[3].bias": (0, 0.25),
            ".layers[3].weight": (0, 9 / (3 * 2 * 2)),
            ".layers[5].bias": (0, 0.25),
            ".layers[5].weight": (0, 9 / 24),
        },
    ),
    "constants": (
        lambda: Network.mlp(4, (), 2).with_constants(3),
        {
            "['constants']": (0, 0.25),
            "['network'][0]['bias']": (0, 0.25),
            "['network'][0]['weight']": (0, 9 / 4),
        },
    ),
}


def by_name(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("name", PRIORS)
def test_prior(name):
    make, expected = PRIORS[name]
    network = make()
    prior = network.prior(weight=3, bias=0.5)
    means, deviations = by_name(prior.mean), by_name(prior.deviations())
    assert set(means) == set(expected)
    for leaf, (mean, variance) in expected.items():
        np.testing.assert_allclose(means[leaf], np.broadcast_to(mean, means[leaf].shape), rtol=1e-6)
        np.testing.assert_allclose(deviations[leaf] ** 2, variance, rtol=1e-6)
    theta = jax.eval_shape(network.init, key(5))
    assert jax.tree.structure(prior.mean) == jax.tree.structure(theta)
    assert jax.tree.map(jnp.shape, prior.mean) == jax.tree.map(jnp.shape, theta)


def test_prior_by_default_and_its_numbers_may_be_traced():
    network = Network.mlp(4, (7,), 2)
    scales = [float(x) for x in jax.tree.leaves(network.prior().scale)]
    np.testing.assert_allclose(scales, [1, np.sqrt(2 / 4), 1, np.sqrt(2 / 7)], rtol=1e-6)
    theta = jax.tree.map(jnp.ones_like, network.prior().mean)
    weights, biases = jnp.array([0.5, 2.0]), jnp.array([1.0, 3.0])
    together = jit(jax.vmap(lambda w, b: network.prior(w, b).log_density(theta)))(weights, biases)
    alone = [network.prior(w, b).log_density(theta) for w, b in ((0.5, 1.0), (2.0, 3.0))]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


# --- repulsion: in the first layer, whitened by the prior, between functions

KERNEL = mf.SquaredExponential(1.5)
SMALL = Network.mlp(1, (4,), 1, "tanh")
PRIOR = SMALL.prior()
ANCHORS = np.linspace(-2, 2, 5, dtype=np.float32)[:, None]


def drawn(n):
    return jax.tree.map(lambda m: jnp.asarray(RNG.normal(size=(n, *m.shape)), jnp.float32), PRIOR.mean)


PARTICLES, ATOMS = drawn(6), drawn(100)


def first_layer(theta):
    return theta[0]


REPULSIONS = {
    "first layer": lambda: mf.SquaredMMD(PRIOR, KERNEL.on(first_layer)),
    "whitened": lambda: mf.SquaredMMD(PRIOR, KERNEL.on(mf.Whiten(PRIOR))),
    "functions": lambda: mf.SquaredMMD(mf.Empirical(ATOMS), KERNEL.on(SMALL.at(ANCHORS))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REPULSIONS)
def test_repulsion_is_the_gradient_of_the_double_sum(name):
    """N ∂/∂θᵢ of 1/N Σ ℓ(θᵢ) + w(1/N² ΣΣ κ(f(θᵢ), f(θⱼ)) − 2/N Σ μ(f(θᵢ))), by autodiff of plain formulas."""
    weight, n, particles, targets = 0.7, 6, PARTICLES, np.sin(ANCHORS)

    def outputs(theta):
        (b, w), (c, v) = ((layer["bias"], layer["weight"]) for layer in theta)
        return jnp.tanh(ANCHORS @ w + b[None]) @ v[:, 0] + c

    def features(theta):
        (b, w), (c, v) = ((layer["bias"], layer["weight"]) for layer in theta)
        if name == "functions":
            return outputs(theta)
        if name == "first layer":
            return jnp.concatenate([b, w[0]])
        return jnp.concatenate([b, w[0] / np.sqrt(2), c, v[:, 0] / np.sqrt(2 / 4)])

    def kappa(x, y):
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, axis=-1) / (2 * 1.5**2))

    def embedding(x):
        if name == "functions":
            return jnp.mean(kappa(x, jax.vmap(features)(ATOMS)), axis=1)
        # exp(−r²/2σ²) averaged over N(0, s²), coordinate by coordinate.
        variance = jnp.ones(x.shape[1]) if name == "whitened" else jnp.repeat(jnp.array([1.0, 2.0]), 4)
        wide = 1.5**2 + variance
        return jnp.prod(1.5 / jnp.sqrt(wide)) * jnp.exp(-jnp.sum(x**2 / (2 * wide)[None], axis=1))

    def energy(particles):
        x = jax.vmap(features)(particles)
        loss = jnp.mean((jax.vmap(outputs)(particles) - targets[None, :, 0]) ** 2)
        return loss + weight * (jnp.mean(kappa(x, x)) - 2 * jnp.mean(embedding(x)))

    with jax.numpy_rank_promotion("allow"):
        gradient = jit(jax.grad(energy))(particles)
    expected = jax.tree.map(lambda leaf, slope: leaf - 0.01 * n * slope, particles, gradient)
    problem = mf.Problem(
        lambda theta: jnp.mean((SMALL.apply(theta, ANCHORS) - targets) ** 2), weight * REPULSIONS[name]()
    )
    solution = mf.solve(problem, mf.WassersteinFlow(0.01), particles, 1, key())
    for leaf, end, start in zip(
        *map(jax.tree.leaves, (solution.measure.particles, expected, particles)), strict=True
    ):
        assert_close(leaf - start, end - start, relative=1e-4)
    further = mf.solve(problem, mf.WassersteinFlow(0.01), solution.state, 5, key())
    assert further.history.loss[-1] < solution.history.loss[0]


# --- outputs


def test_constants_are_appended_to_every_row():
    network = Network.mlp(3, (5, 5), 2, "tanh")
    wider = network.with_constants(3)
    theta, plain = jit(lambda k: (wider.init(k), network.init(k)))(key(1))
    np.testing.assert_array_equal(theta["constants"], np.zeros(3))
    for leaf, expected in zip(*map(jax.tree.leaves, (theta["network"], plain)), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    theta = {"network": LAYERS, "constants": jnp.array([1.0, -2.0, 0.5])}
    outputs = wider.apply(theta, INPUTS)
    np.testing.assert_allclose(outputs[:, :2], network.apply(LAYERS, INPUTS), rtol=1e-6)
    np.testing.assert_array_equal(outputs[:, 2:], np.tile([[1.0, -2.0, 0.5]], (7, 1)))
    # They are learned: each row hands on its share.
    slope = jax.grad(lambda t: jnp.sum(wider.apply(t, INPUTS)))(theta)
    np.testing.assert_allclose(slope["constants"], [7.0, 7.0, 7.0])
    again = {"network": theta, "constants": jnp.array([9.0])}
    np.testing.assert_array_equal(wider.with_constants(1).apply(again, INPUTS)[:, 5], np.full(7, 9.0))
    assert Network.equinox(make_equinox).with_constants(1).output_axis == 0


def test_one_number_per_row_is_one_column():
    scalar = Network.equinox(lambda k: eqx.nn.MLP(3, "scalar", 4, 1, key=k))
    module = jit(lambda k: eqx.nn.MLP(3, "scalar", 4, 1, key=k))(key())
    outputs = scalar.apply(eqx.filter(module, eqx.is_inexact_array), INPUTS)
    assert outputs.shape == (7, 1)
    assert_close(outputs[:, 0], [module(x) for x in jnp.asarray(INPUTS)])
    flat = Network(lambda k: jax.random.normal(k, (3,)), lambda theta, x: x @ theta)
    assert flat.apply(jnp.ones(3), INPUTS).shape == (7, 1)


def test_inputs_may_be_a_pytree():
    network = Network(
        lambda k: jax.random.normal(k, (3, 2)), lambda theta, batch: batch["x"] @ theta + batch["offset"]
    )
    inputs = {"x": INPUTS, "offset": np.ones((7, 2), np.float32)}
    assert_close(network.at(inputs)(jnp.ones((3, 2))), INPUTS.sum(axis=1, keepdims=True) + np.ones((7, 2)))


# --- what a user may get wrong


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=True)(linen.Dense(2)(x))


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=False)(linen.Dense(2)(x))


def nnx_sequence(layer):
    return Network.nnx(lambda rngs: nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), layer(rngs)))


def equinox_sequence(layer):
    return Network.equinox(lambda k: eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=k), layer]))


def zeros(network):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(network.init, key()))


def applied(network):
    return network.apply(zeros(network), INPUTS)


def fixed(outputs):
    return lambda: applied(Network(lambda k: jnp.zeros(2), lambda theta, x: outputs))


MISTAKES = {
    "init": (lambda: Network(3, plain_apply), TypeError, ["init", "3", "init(key)"]),
    "apply": (lambda: Network(plain_init, None), TypeError, ["apply", "None"]),
    "output_axis": (
        lambda: Network(plain_init, plain_apply, 1),
        ValueError,
        ["output_axis", "got 1", "(..., in, out)"],
    ),
    "no parameters": (lambda: Network(lambda k: [], plain_apply), ValueError, ["no parameters"]),
    "no parameters, equinox": (
        lambda: Network.equinox(lambda k: eqx.nn.Identity()),
        ValueError,
        ["no parameters"],
    ),
    "no parameters, linen": (
        lambda: Network.linen(linen.Sequential([linen.tanh]), INPUTS),
        ValueError,
        ["no parameters"],
    ),
    "no parameters, nnx": (
        lambda: Network.nnx(lambda rngs: nnx.Sequential(jnp.tanh)),
        ValueError,
        ["no parameters"],
    ),
    "integers": (
        lambda: Network(lambda k: {"a": jnp.ones(2), "n": jnp.arange(2)}, plain_apply),
        TypeError,
        ["int32", "['n']", "inside apply"],
    ),
    "hidden": (lambda: Network.mlp(3, 50), TypeError, ["hidden", "50", "hidden=(50,)"]),
    "hidden width": (lambda: Network.mlp(3, (50, 0)), ValueError, ["hidden", "got 0", "hidden=()"]),
    "features": (lambda: Network.mlp(0), ValueError, ["features", "got 0"]),
    "outputs": (lambda: Network.mlp(3, outputs=1.5), TypeError, ["outputs", "1.5"]),
    "activation": (
        lambda: Network.mlp(3, activation="rleu"),
        ValueError,
        ["activation", "'rleu'", "relu", "tanh"],
    ),
    "skip": (lambda: Network.mlp(3, skip=1), TypeError, ["skip", "True or False", "1"]),
    "activation a function": (
        lambda: Network.mlp(3, activation=jnp.tanh),
        ValueError,
        ["activation", "softplus"],
    ),
    "n": (lambda: Network.mlp(3).sample(key(), 0), ValueError, ["n must", "got 0", "particles"]),
    "key": (lambda: Network.mlp(3).sample(0, 3), TypeError, ["key", "got 0", "jax.random.key(0)"]),
    "weight": (lambda: Network.mlp(3).prior(weight=-1.0), ValueError, ["weight", "-1.0"]),
    "bias": (lambda: Network.mlp(3).prior(bias=0), ValueError, ["bias", "got 0"]),
    "count": (lambda: Network.mlp(3).with_constants(0), ValueError, ["count", "got 0"]),
    "anchors": (lambda: Network.mlp(3).at([1.0, 2.0]), ValueError, ["inputs", "leading axis"]),
    "columns": (lambda: applied(Network.mlp(4)), ValueError, ["inputs", "(rows, 4)", "(7, 3)"]),
    "one row": (
        lambda: Network.mlp(3).apply(zeros(Network.mlp(3)), INPUTS[0]),
        ValueError,
        ["inputs", "(rows, 3)", "(3,)"],
    ),
    "rows lost": (fixed(jnp.ones((3, 2))), ValueError, ["(rows, outputs)", "(3, 2)", "(7, 3)"]),
    "too many axes": (fixed(jnp.ones((7, 2, 2))), ValueError, ["(rows, outputs)", "(7, 2, 2)", "one axis"]),
    "mean of rows": (fixed(jnp.ones(())), ValueError, ["(rows, outputs)", "()"]),
    "two outputs": (fixed((jnp.ones((7, 1)), jnp.ones((7, 1)))), TypeError, ["tuple", "concatenate"]),
    "equinox state": (
        lambda: Network.equinox(lambda k: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="batch")),
        ValueError,
        ["BatchNorm", "training=True", "inference_mode", "GroupNorm"],
    ),
    "equinox state inside": (
        lambda: equinox_sequence(eqx.nn.BatchNorm(2, "batch", mode="batch")),
        ValueError,
        ["state", "StateIndex", "GroupNorm"],
    ),
    "equinox dropout": (
        lambda: equinox_sequence(eqx.nn.Dropout(0.5)),
        ValueError,
        ["Dropout(0.5)", "inference_mode"],
    ),
    "equinox module": (lambda: Network.equinox(3), TypeError, ["make", "got 3", "lambda key"]),
    "nnx module": (
        lambda: Network.nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
        TypeError,
        ["make", "lambda rngs"],
    ),
    "linen class": (lambda: Network.linen(Normalised, INPUTS), TypeError, ["instance", "Network.nnx"]),
    "linen batch_stats": (
        lambda: Network.linen(Normalised(), INPUTS),
        ValueError,
        ["batch_stats", "GroupNorm"],
    ),
    "linen dropout": (
        lambda: Network.linen(Dropped(), INPUTS),
        ValueError,
        ["random numbers", "dropout", "deterministic"],
    ),
    "linen inputs": (lambda: Network.linen(LinenStack(), 3.0), ValueError, ["inputs", "leading axis"]),
    "nnx of linen": (lambda: Network.nnx(lambda rngs: LinenStack()), TypeError, ["make", "Network.linen"]),
    "nnx batch statistics": (
        lambda: applied(nnx_sequence(lambda rngs: nnx.BatchNorm(2, rngs=rngs))),
        ValueError,
        ["changes its own variables", "['mean']", "training=True", "eval()"],
    ),
    "nnx dropout": (
        lambda: applied(nnx_sequence(lambda rngs: nnx.Dropout(0.5, rngs=rngs))),
        ValueError,
        ["changes its own variables", "['count']", "eval()"],
    ),
    "nnx dropout, compiled": (
        lambda: eqx.filter_jit(applied)(nnx_sequence(lambda rngs: nnx.Dropout(0.5, rngs=rngs))),
        ValueError,
        ["changes its own variables", "['count']", "eval()"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name):
    act, kind, pieces = MISTAKES[name]
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(kind) as caught, jax.numpy_dtype_promotion("standard"):
            act()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    message = str(caught.value)
    for piece in pieces:
        assert piece in message, f"{piece!r} not in: {message}"
    assert "; " in message, f"no remedy in: {message}"


def test_layers_that_only_look_stateful():
    """Dropout that is off is a function of θ and inputs; so is an Equinox module in inference mode."""
    off = nnx_sequence(lambda rngs: nnx.Dropout(0.5, rngs=rngs, deterministic=True))
    assert applied(off).shape == (7, 2)
    assert applied(equinox_sequence(eqx.nn.Dropout(0.5, inference=True))).shape == (7, 2)
    assert applied(equinox_sequence(eqx.nn.Dropout(0.0))).shape == (7, 2)


@pytest.mark.parametrize("make", [lambda: Network.linen(LinenStack(), INPUTS), lambda: Network.nnx(NnxStack)])
def test_without_flax(make, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "flax"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs Flax.*pip install flax"):
        make()


def test_flax_is_not_imported_until_asked_for():
    tree = ast.parse(Path(network_module.__file__).read_text(encoding="utf-8"))
    assert "flax" in ast.unparse(tree)
    assert not any(
        "flax" in ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    )


def test_activations_joined_by_plus_share_the_units():
    network = Network.mlp(3, (5,), 2, "relu+tanh")
    theta, inputs = network.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (7, 3))
    units = inputs @ theta[0]["weight"]
    hidden = jnp.concatenate([jax.nn.relu(units[:, :2]), jnp.tanh(units[:, 2:])], axis=1)
    np.testing.assert_allclose(network.apply(theta, inputs), hidden @ theta[1]["weight"], rtol=1e-5)
    with pytest.raises(ValueError, match=r"activation.*relu\+swish.*joined by \+"):
        Network.mlp(3, (5,), 2, "relu+swish")


def test_a_skip_adds_a_linear_function_of_the_inputs():
    network, layers = (Network.mlp(3, (5,), 2, "tanh", skip=skip) for skip in (True, False))
    theta, inputs = network.init(key(0)), jax.random.normal(key(1), (7, 3))
    plain = [{name: layer[name] for name in ("weight", "bias")} for layer in theta]
    assert_close(network.apply(theta, inputs), layers.apply(plain, inputs) + inputs @ theta[1]["skip"], 1e-5)
    draws = np.asarray(network.sample(key(2), 4_000)[1]["skip"])
    assert_within(np.mean(draws**2), 2 / 3, 2 / 3 * np.sqrt(2 / draws.size))
    assert_close(network.prior().scale[1]["skip"], np.sqrt(2 / 3), 1e-6)


def test_computed_in_another_precision():
    """Outputs are bfloat16's, 8 bits; parameters, outputs and gradients are float32."""
    network = Network.mlp(3, (5, 5), 2)
    half = network.computed_in(jnp.bfloat16)
    theta = half.init(key())
    outputs, exact = half.apply(theta, INPUTS), network.apply(theta, INPUTS)
    assert outputs.dtype == jnp.float32
    assert np.array_equal(outputs, outputs.astype(jnp.bfloat16).astype(jnp.float32))
    assert 0 < np.max(np.abs(outputs - exact)) < 2**-5 * np.max(np.abs(exact))
    slopes = jax.grad(lambda t: jnp.sum(half.apply(t, INPUTS)))(theta)
    assert {leaf.dtype for leaf in jax.tree.leaves(slopes)} == {jnp.dtype(jnp.float32)}
    assert pickle.loads(pickle.dumps(half)) == half == network.computed_in("bfloat16")
    with pytest.raises(ValueError, match="dtype must be of floating-point numbers, got int32"):
        network.computed_in(jnp.int32)


def test_an_ensemble_in_mixed_precision_learns_with_float32_particles():
    network = Network.mlp(1, (16,), 1).computed_in(jnp.bfloat16)
    x = jnp.linspace(-1, 1, 64)[:, None]
    problem = mf.deep_ensemble(mf.MeanSquaredError(network))
    solution = mf.solve(
        problem, mf.WassersteinFlow(1e-2), network.sample(key(), 3), 300, key(1), data=(x, 3 * x + 1)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(solution.measure.particles)} == {jnp.dtype(jnp.float32)}
    assert solution.history.loss[-1] < 0.05 * solution.history.loss[0]
