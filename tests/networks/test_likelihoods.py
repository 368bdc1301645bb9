"""Outputs to distributions against SciPy, losses by hand, and the shapes that must not pass."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats as st
from helpers import assert_close, jit, key

import measureflow as mf
from measureflow.networks.likelihoods import (
    Bernoulli,
    Categorical,
    Heteroscedastic,
    Homoscedastic,
    NegativeBinomial,
    Poisson,
    StudentT,
    rescaled,
)
from measureflow.networks.losses import MeanSquaredError, NegativeLogLikelihood
from measureflow.networks.network import Network

# NumPyro's code promotes integers and ranks.
pytestmark = pytest.mark.standard_promotion

ROWS = 6
RNG = np.random.default_rng(0)


def softplus(x):
    return np.logaddexp(x, 0)


def negative_binomial(o):
    mean, concentration = np.exp(o[0]), softplus(o[1]) + 1e-3
    return st.nbinom(concentration, concentration / (concentration + mean)).logpmf


def categorical(o):
    return lambda y: np.take_along_axis(o - np.logaddexp.reduce(o, axis=0), y[None].astype(int), axis=0)[0]


NORMAL, COUNTS = RNG.normal(size=(ROWS, 3)), RNG.integers(0, 6, size=(ROWS, 3))

# name: (the likelihood as a function of its number of targets, log p given o₁, o₂, … in SciPy, targets)
LIKELIHOODS = {
    "heteroscedastic": (
        lambda t: Heteroscedastic(targets=t, smallest_scale=0.05),
        lambda o: st.norm(o[0], softplus(o[1]) + 0.05).logpdf,
        NORMAL,
    ),
    "homoscedastic": (
        lambda t: Homoscedastic(targets=t, smallest_scale=0.05),
        lambda o: st.norm(o[0], softplus(o[1]) + 0.05).logpdf,
        NORMAL,
    ),
    "student": (
        lambda t: StudentT(targets=t, smallest_scale=0.05),
        lambda o: st.t(2.001 + softplus(o[2]), o[0], softplus(o[1]) + 0.05).logpdf,
        NORMAL,
    ),
    "bernoulli": (
        lambda t: Bernoulli(targets=t),
        lambda o: st.bernoulli(1 / (1 + np.exp(-o[0]))).logpmf,
        COUNTS % 2,
    ),
    "categorical": (lambda t: Categorical(6, targets=t), categorical, COUNTS),
    "poisson": (lambda t: Poisson(targets=t), lambda o: st.poisson(np.exp(o[0])).logpmf, COUNTS),
    "negative binomial": (lambda t: NegativeBinomial(targets=t), negative_binomial, COUNTS),
}
WIDTHS = {
    "heteroscedastic": (2, 0),
    "homoscedastic": (2, 1),
    "student": (3, 1),
    "bernoulli": (1, 0),
    "categorical": (6, 0),
    "poisson": (1, 0),
    "negative binomial": (2, 0),
}


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihood(name, targets):
    """Every o₁ comes first: column j·T + t of the outputs is number j of target t."""
    make, exact, values = LIKELIHOODS[name]
    likelihood = make(targets)
    per_target, constants = WIDTHS[name]
    assert (likelihood.outputs_per_target, likelihood.constants) == (per_target, constants)
    assert likelihood.width == per_target * targets
    outputs = np.random.default_rng(1).normal(size=(ROWS, per_target * targets)).astype(np.float32)
    expected = sum(
        exact(np.float64(outputs[:, t::targets].T))(np.float64(values[:, t])) for t in range(targets)
    )
    y = jnp.asarray(values[:, 0] if targets == 1 else values)
    # As they come, and with more batch axes, as the particles are.
    for cases in ((ROWS,), (2, 3)):

        def log_prob(outputs, y, cases=cases):
            law = likelihood(outputs)
            assert law.batch_shape == cases
            assert law.event_shape == (() if targets == 1 else (3,))
            return law.log_prob(y)

        found = jit(log_prob)(jnp.asarray(outputs).reshape(*cases, -1), y.reshape(*cases, *y.shape[1:]))
        assert_close(found.reshape(-1), expected, 1e-5)


@pytest.mark.parametrize("name", ["homoscedastic", "student"])
def test_constants_of_a_network_are_those_of_the_likelihood(name):
    """What does not depend on the input is one number per target, for all rows, and in its order."""
    likelihood = LIKELIHOODS[name][0](3)
    network = Network.mlp(2, (4,), likelihood.width - 3).with_constants(likelihood.constants * 3)
    theta = network.init(key()) | {"constants": jnp.array([-1.0, 0.5, 2.0])}
    law = likelihood(network.apply(theta, jnp.asarray(RNG.normal(size=(ROWS, 2)), jnp.float32))).base_dist
    constant = law.scale if name == "homoscedastic" else law.df
    floor = 0.05 if name == "homoscedastic" else 2.001
    assert_close(constant, np.tile(softplus(np.array([-1.0, 0.5, 2.0])) + floor, (ROWS, 1)))
    assert np.ptp(np.asarray(law.loc), axis=0).min() > 1e-3


def test_floors():
    """Densities stay bounded, variances finite and gradients finite, however far the outputs go."""
    far = jnp.array([[0.0, -1e4, -1e4], [0.0, 1e4, 1e4]])
    for scale in (1e-4, 0.3):
        normal = Heteroscedastic(smallest_scale=scale)(far[:1, :2])
        np.testing.assert_allclose(normal.log_prob(0.0), -np.log(scale * np.sqrt(2 * np.pi)), rtol=1e-5)
    assert float(Heteroscedastic()(far[:1, :2]).scale[0]) == float(Homoscedastic()(far[:1, :2]).scale[0])
    assert float(Heteroscedastic()(far[:1, :2]).scale[0]) == pytest.approx(1e-4)
    assert np.all(np.isfinite(StudentT()(far).variance))
    for likelihood in (Poisson(), NegativeBinomial()):
        outputs = jnp.tile(jnp.array([[-1e4], [1e4]]), (1, likelihood.width))
        density = eqx.Partial(lambda law, o: jnp.sum(law(o).log_prob(3.0)), likelihood)
        value, pull = jit(jax.value_and_grad(density))(outputs)
        assert np.isfinite(value)
        assert np.all(np.isfinite(pull))


def test_a_new_floor_compiles_nothing():
    traces = []

    @eqx.filter_jit
    def density(likelihood, outputs):
        traces.append(None)
        return likelihood(outputs).log_prob(0.0)

    for scale in (1e-4, 0.5, np.float32(0.1), jnp.asarray(2.0)):
        density(Heteroscedastic(smallest_scale=scale), jnp.zeros((3, 2)))
    assert len(traces) == 1


# Losses

NETWORK = Network.mlp(2, (5,), 2, "tanh")
LINE = Network(lambda key: jnp.zeros((2, 1)), lambda theta, x: x @ theta)
X = jnp.asarray(RNG.normal(size=(ROWS, 2)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(ROWS, 2)), jnp.float32)
W = jnp.asarray(RNG.uniform(0.2, 3, size=ROWS), jnp.float32)
THETA = NETWORK.init(key())
WIDE = Network.mlp(2, (5,), 4, "tanh")


def by_hand(theta=THETA, y=None):
    o = np.asarray(NETWORK.apply(theta, X), np.float64)
    y = np.asarray(Y[:, 0], np.float64) if y is None else y
    return -st.norm(o[:, 0], softplus(o[:, 1]) + 1e-4).logpdf(y)


def test_negative_log_likelihood():
    loss = jit(NegativeLogLikelihood(NETWORK, Heteroscedastic()))
    assert_close(loss(THETA, (X, Y[:, 0])), by_hand().mean())
    assert_close(loss(THETA, [X, np.asarray(Y[:, 0])]), by_hand().mean())
    # The mean over rows, not over weights.
    assert_close(loss(THETA, (X, Y[:, 0], W)), (np.asarray(W, np.float64) * by_hand()).mean())
    assert_close(loss(THETA, (X, Y[:, 0], np.full(ROWS, 2))), 2 * by_hand().mean())


def test_batches_are_unbiased_also_with_weights():
    loss = jit(NegativeLogLikelihood(NETWORK, Heteroscedastic()))
    batches = [(X[i : i + 2], Y[i : i + 2, 0], W[i : i + 2]) for i in (0, 2, 4)]
    assert_close(np.mean([loss(THETA, batch) for batch in batches]), loss(THETA, (X, Y[:, 0], W)), 1e-6)


def test_several_targets_are_summed():
    theta = WIDE.init(key(1))
    o = np.asarray(WIDE.apply(theta, X), np.float64)
    exact = -st.norm(o[:, :2], softplus(o[:, 2:]) + 1e-4).logpdf(np.asarray(Y, np.float64)).sum(axis=1).mean()
    assert_close(NegativeLogLikelihood(WIDE, Heteroscedastic(targets=2))(theta, (X, Y)), exact)

    def without_event(outputs):
        return dist.Normal(outputs[..., :2], jax.nn.softplus(outputs[..., 2:]) + 1e-4)

    assert_close(NegativeLogLikelihood(WIDE, without_event)(theta, (X, Y)), exact)


@pytest.mark.parametrize("kind", [np.int32, np.int64, bool, np.float32])
def test_kinds_of_targets(kind):
    """Zeros and ones mean the same as integers, truth values and floats."""
    theta, y = jnp.array([[1.0], [-2.0]]), np.array([0, 1, 1, 0, 1, 1])
    logit = np.asarray(X @ theta, np.float64)[:, 0]
    losses = (
        NegativeLogLikelihood(LINE, Bernoulli()),
        NegativeLogLikelihood(LINE, Poisson()),
        MeanSquaredError(LINE),
    )
    found = jit(lambda batch: [loss(theta, batch) for loss in losses])((X, jnp.asarray(y.astype(kind))))
    expected = (
        -st.bernoulli(1 / (1 + np.exp(-logit))).logpmf(y).mean(),
        -st.poisson(np.exp(logit)).logpmf(y).mean(),
        np.mean((logit - y) ** 2),
    )
    assert_close(found, expected)


def test_classes():
    y = np.array([0, 1, 1, 0, 1, 1])
    o = np.asarray(NETWORK.apply(THETA, X), np.float64)
    log_probabilities = o - np.logaddexp.reduce(o, axis=1, keepdims=True)
    loss = NegativeLogLikelihood(NETWORK, Categorical(2))
    assert_close(loss(THETA, (X, y)), -log_probabilities[np.arange(ROWS), y].mean())
    with pytest.raises(TypeError, match=r"integers.*float32; pass y.astype"):
        loss(THETA, (X, y.astype(np.float32)))
    # A class that does not exist is not taken for another.
    assert not np.isfinite(jax.jit(loss)(THETA, (X, y + 1)))


def test_mean_squared_error():
    theta = jnp.array([[1.0], [-2.0]])
    residual = np.asarray(X, np.float64) @ np.array([1.0, -2.0]) - np.asarray(Y[:, 0], np.float64)
    assert_close(MeanSquaredError(LINE)(theta, (X, Y[:, 0])), np.mean(residual**2))
    assert_close(MeanSquaredError(LINE)(theta, (X, Y[:, :1])), np.mean(residual**2))
    assert_close(MeanSquaredError(LINE)(theta, (X, Y[:, 0], W)), np.mean(np.asarray(W) * residual**2))
    # Squares of several targets are summed, not averaged.
    o = np.asarray(NETWORK.apply(THETA, X), np.float64)
    exact = np.mean(np.sum((o - np.asarray(Y, np.float64)) ** 2, axis=1))
    assert_close(MeanSquaredError(NETWORK)(THETA, (X, Y)), exact)


def test_a_problem_with_this_loss_is_solved():
    """The minimiser of the squared error of a line is least squares; the learned noise is the residual."""
    exact, residual, *_ = np.linalg.lstsq(np.asarray(X), np.asarray(Y[:, 0]), rcond=None)
    problem = mf.deep_ensemble(NegativeLogLikelihood(LINE.with_constants(1), Homoscedastic()))
    start = {"network": jnp.zeros((1, 2, 1)), "constants": jnp.zeros((1, 1))}
    flow = mf.WassersteinFlow(optimiser=optax.adam(0.05))
    end = mf.solve(problem, flow, start, 600, key(), data=(X, Y[:, 0])).measure.particles
    np.testing.assert_allclose(end["network"][0, :, 0], exact, atol=1e-3)
    noise = softplus(float(end["constants"][0, 0])) + 1e-4
    np.testing.assert_allclose(noise, np.sqrt(residual[0] / ROWS), rtol=1e-3)


def test_likelihoods_and_losses_pickle():
    for name, (make, _, _) in LIKELIHOODS.items():
        likelihood = pickle.loads(pickle.dumps(make(1)))
        network = Network.mlp(2, (5,), WIDTHS[name][0])
        loss = pickle.loads(pickle.dumps(NegativeLogLikelihood(network, likelihood)))
        assert np.isfinite(jit(loss)(network.init(key()), (X, np.zeros(ROWS, np.int32))))


# Units


@pytest.mark.parametrize("family", ["normal", "student"])
@pytest.mark.parametrize("several", [False, True])
def test_rescaled(family, several):
    """log p of c + s·y is log p of y less log s, for each target."""
    shape = (ROWS, 3) if several else (ROWS,)
    loc, scale = RNG.normal(size=shape), RNG.uniform(0.5, 2, size=shape)
    y = RNG.normal(size=shape)
    location, unit = (np.array([1.0, -3.0, 100.0]), np.array([2.0, 0.1, 30.0])) if several else (5.0, 0.25)
    numbers = [jnp.asarray(array, jnp.float32) for array in (loc, scale)]
    law = dist.Normal(*numbers) if family == "normal" else dist.StudentT(3.5, *numbers)
    exact = st.norm(loc, scale) if family == "normal" else st.t(3.5, loc, scale)
    moved = rescaled(law.to_event(1) if several else law, location, unit)
    expected = exact.logpdf(y) - np.log(unit)
    assert_close(moved.log_prob(location + unit * y), expected.sum(axis=1) if several else expected, 1e-4)
    assert_close(moved.mean, location + unit * loc)
    assert_close(moved.variance, unit**2 * exact.var())
    assert moved.event_shape == ((3,) if several else ())


def test_rescaled_by_traced_numbers():
    law = dist.Normal(jnp.arange(3.0), 2.0)
    means = jax.jit(jax.vmap(lambda c, s: rescaled(law, c, s).mean))(
        jnp.array([0.0, 1.0]), jnp.array([1.0, -2])
    )
    np.testing.assert_allclose(means, [[0, 1, 2], [1, -1, -3]])


def test_rescaled_with_a_location_for_each_case():
    law = dist.Normal(jnp.zeros((ROWS, 3)), 2.0).to_event(1)
    centres = RNG.normal(size=(ROWS, 1))
    assert_close(rescaled(law, centres, 0.5).mean, np.tile(centres, (1, 3)))
    assert_close(rescaled(law, centres, 0.5).variance, np.ones((ROWS, 3)))


# What must not pass


def nll(network=NETWORK, likelihood=None):
    return NegativeLogLikelihood(network, Heteroscedastic() if likelihood is None else likelihood)


def first_only(outputs):
    return dist.Normal(outputs[0], 1.0)


WRONG = {
    "column of targets": (lambda: nll()(THETA, (X, Y[:, :1])), ValueError, ["(6, 1)", "(6,)", "[..., 0]"]),
    "too many targets": (lambda: nll()(THETA, (X, Y)), ValueError, ["targets", "(6, 2)", "(6,)"]),
    "too few targets": (
        lambda: nll(WIDE, Heteroscedastic(targets=2))(WIDE.init(key()), (X, Y[:, 0])),
        ValueError,
        ["targets", "(6,)", "(6, 2)"],
    ),
    "other rows": (lambda: nll()(THETA, (X, Y[:3, 0])), ValueError, ["targets", "(3,)", "(6,)"]),
    "column without an event": (
        lambda: nll(LINE, lambda o: dist.Normal(o, 1.0))(jnp.zeros((2, 1)), (X, Y[:, 0])),
        ValueError,
        ["targets", "(6,)", "(6, 1)"],
    ),
    "rows lost": (
        lambda: nll(NETWORK, first_only)(THETA, (X, Y[:, 0])),
        ValueError,
        ["(2,)", "law for each of (6,)"],
    ),
    "no distribution": (
        lambda: nll(NETWORK, lambda o: o)(THETA, (X, Y[:, 0])),
        TypeError,
        ["likelihood", "NumPyro distribution"],
    ),
    "weights": (lambda: nll()(THETA, (X, Y[:, 0], Y)), ValueError, ["weights", "(6, 2)", "(6,)"]),
    "batch of one": (lambda: nll()(THETA, (X,)), TypeError, ["batch", "(inputs, targets)", "(6, 2)"]),
    "batch of four": (lambda: nll()(THETA, (X, X, X, X)), TypeError, ["batch", "weights"]),
    "batch an array": (lambda: nll()(THETA, X), TypeError, ["batch", "data=(X, y)"]),
    "width": (
        lambda: nll(LINE)(jnp.zeros((2, 1)), (X, Y[:, 0])),
        ValueError,
        ["Heteroscedastic", "1 target", "reads 2 outputs", "(6, 1)", "with 2 outputs."],
    ),
    "width with constants": (
        lambda: StudentT(targets=2)(jnp.zeros((6, 4))),
        ValueError,
        ["StudentT", "reads 6 outputs", "(6, 4)", "with 4 outputs and .with_constants(2)"],
    ),
    "mse columns": (
        lambda: MeanSquaredError(NETWORK)(THETA, (X, Y[:, 0])),
        ValueError,
        ["targets", "(6,)", "(6, 2)"],
    ),
    "mse rows": (
        lambda: MeanSquaredError(LINE)(jnp.zeros((2, 1)), (X, Y[:3, 0])),
        ValueError,
        ["targets", "(3, 1)", "(6, 1)"],
    ),
    "complex targets": (
        lambda: nll()(THETA, (X, Y[:, 0] + 1j)),
        TypeError,
        ["targets", "real", "complex", "z.imag"],
    ),
    "targets 0": (lambda: Bernoulli(targets=0), ValueError, ["targets", "at least 1", "got 0"]),
    "targets 1.5": (lambda: Bernoulli(targets=1.5), TypeError, ["targets", "1.5"]),
    "classes 1": (lambda: Categorical(1), ValueError, ["classes", "at least 2", "got 1"]),
    "no floor": (
        lambda: Heteroscedastic(smallest_scale=0.0),
        ValueError,
        ["smallest_scale", "0.0", "unbounded"],
    ),
    "rescaled Bernoulli": (
        lambda: rescaled(dist.Bernoulli(logits=jnp.zeros(3)), 0.0, 2.0),
        TypeError,
        ["BernoulliLogits", "StudentT and mixtures of Normals", "leave location and scale out"],
    ),
    "rescaled by other rows": (
        lambda: rescaled(dist.Normal(jnp.zeros(3)), np.zeros(4), 1.0),
        ValueError,
        ["location", "(4,)", "()"],
    ),
    "rescaled by targets that there are not": (
        lambda: rescaled(dist.Normal(jnp.zeros((3, 2))), np.zeros(2), 1.0),
        ValueError,
        ["location", "(2,)", "()"],
    ),
    "scale by rows": (
        lambda: rescaled(dist.Normal(jnp.zeros(3)), 0.0, np.ones(3)),
        ValueError,
        ["scale", "(3,)", "()"],
    ),
    "rescaled by 0": (
        lambda: rescaled(dist.Normal(jnp.zeros(3)), 0.0, 0.0),
        ValueError,
        ["scale", "> 0", "0.0"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_message(name):
    act, kind, pieces = WRONG[name]
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    for piece in pieces:
        assert piece in message, f"{piece!r} not in: {message}"
    assert "; " in message, f"no remedy in: {message}"


LIBRARIES = {
    "torch.nn.modules.module": "Network.torch.*PyTorch",
    "flax.linen.module": r"Network\.linen\(module, inputs\)",
    "flax.nnx.module": r"Network\.nnx\(make\)",
    "equinox._module": r"Network\.equinox\(make\)",
    "keras.src.layers.layer": "Keras.*Network.mlp",
    "somewhere.else": r"pass Network\(init, apply\)",
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("use", [nll, MeanSquaredError, lambda n: mf.Predictive(n, Bernoulli(), THETA)])
def test_modules_of_other_libraries_are_no_networks(library, use):
    """PyTorch's modules have a method `apply`, too, which applies a function to each of them."""
    base = type("Module", (), {"__module__": library, "apply": lambda self, function: self})
    module = type("Mine", (base,), {"__module__": "__main__"})()
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            TypeError, match=f"network must be a Network, got __main__.Mine; .*{LIBRARIES[library]}"
        ):
            use(module)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("mean", [0.3, 9.0, 11.0, 1e3, 1e5, 1e6, 1e8])
def test_densities_of_large_counts_keep_their_digits(mean):
    """Of 10⁸, NumPyro's log p is off by more than 200; and gradients are those of y log λ − λ."""
    law = Poisson()(jnp.log(jnp.full((9, 1), mean)))
    rate = np.asarray(law.rate, np.float64)
    y = np.maximum(np.round(mean + np.sqrt(mean) * np.array([-40, -5, -2, -0.5, 0, 0.5, 2, 5, 40])), 0)
    y = y.astype(np.float32)
    truth = st.poisson(rate).logpmf(y.astype(np.float64))
    np.testing.assert_allclose(law.log_prob(jnp.asarray(y)), truth, rtol=2e-6, atol=1e-5)
    slope = jit(jax.grad(lambda rate: jnp.sum(type(law)(rate).log_prob(jnp.asarray(y)))))(law.rate)
    np.testing.assert_allclose(slope, y / rate - 1, rtol=1e-5, atol=1e-6)
    if mean >= 1e6:
        assert np.max(np.abs(np.asarray(dist.Poisson(law.rate).log_prob(y), np.float64) - truth)) > 0.5


IMPOSSIBLE = [
    (Categorical(3), [0, 1, 2], [0, 3, 1]),
    (Categorical(3), [0, 1, 2], [0, -1, 1]),
    (Bernoulli(), [0, 1, 1], [0, 1, 2]),
    (Bernoulli(), [0.0, 1.0, 1.0], [0.0, -1.0, 1.0]),
    (Poisson(), [0, 5, 1], [0, -1, 1]),
    (NegativeBinomial(), [0.0, 5.0, 1.0], [0.0, 0.5, 1.0]),
]


@pytest.mark.parametrize(("likelihood", "fine", "wrong"), IMPOSSIBLE)
def test_targets_that_cannot_be_are_not_taken_for_others(likelihood, fine, wrong):
    """JAX would take the last class for one beyond it, and the loss would be a number."""
    network = Network.mlp(2, (), likelihood.width)
    loss = jit(NegativeLogLikelihood(network, likelihood))
    theta = network.init(key())
    assert np.isfinite(loss(theta, (X[:3], np.array(fine))))
    assert np.isnan(loss(theta, (X[:3], np.array(wrong))))


@pytest.mark.parametrize("likelihood", [Heteroscedastic, dist.Normal(0.0, 1.0), None])
def test_not_a_likelihood(likelihood):
    with pytest.raises(Exception, match=r"likelihood"):
        NegativeLogLikelihood(NETWORK, likelihood)
