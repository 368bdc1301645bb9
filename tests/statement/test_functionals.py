"""Functionals of Q: their values, the dynamics that JAX derives, and the laws they lead to."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_close, key
from scipy import stats

import measureflow as mf
from measureflow.statement.free_energy import FreeEnergy

CASES = jnp.asarray(np.random.default_rng(0).normal(0.4, 1.3, 12), jnp.float32)
X = jax.random.normal(jax.random.key(1), (7, 2))
WEIGHTS = jnp.array([0.3, 0.1, 0.2, 0.05, 0.15, 0.12, 0.08])


def log_density(theta, batch):
    """A Normal location model with scale 0.8, on the first coordinate; the second is idle but for a bend."""
    location = theta[0] + 0.1 * jnp.sin(theta[1])
    return dist.Normal(location, 0.8).log_prob(batch)


def prediction(theta, batch):
    scale = jnp.broadcast_to(0.5 + 0.2 * theta[1] ** 2, batch.shape)
    return dist.Normal(jnp.broadcast_to(theta[0], batch.shape), scale), batch


def squares(theta):
    return {"first": theta[0], "all": theta**2}


def of_moments(mean, batch=None):
    return jnp.exp(0.3 * mean["first"]) + jnp.sum(mean["all"] ** 2)


class Everything(mf.AbstractFunctional):
    """The rest alone: another functional's value, without its normal form."""

    functional: mf.AbstractFunctional

    def value(self, measure, batch=None):
        return self.functional.value(measure, batch)


FUNCTIONALS = {
    "loss": (mf.ExpectedLoss(lambda theta, batch: jnp.mean((batch - theta[0]) ** 2) + theta[1] ** 2), CASES),
    "log score": (mf.LogScore(log_density), CASES),
    "CRPS": (mf.RankedProbabilityScore(prediction), CASES),
    "kernel score": (mf.KernelScore(prediction, mf.SquaredExponential(0.9)), CASES),
    "moment": (mf.Moment(squares, of_moments), None),
    "MMD²": (mf.SquaredMMD(mf.Gaussian(jnp.zeros(2), 1.0), mf.SquaredExponential(0.7)), None),
}


# ---- Values, against NumPy. ----


def test_log_score_is_that_of_the_mixture():
    value = mf.LogScore(log_density).value(mf.Empirical(X, WEIGHTS), CASES)
    x, y, w = (np.asarray(a, np.float64) for a in (X, CASES, WEIGHTS))
    location = x[:, 0] + 0.1 * np.sin(x[:, 1])
    density = w @ stats.norm.pdf(y[None, :], location[:, None], 0.8)
    assert_close(value, -np.mean(np.log(density)))
    # Jensen: the mixture predicts at least as well as its members do on average.
    bayes = mf.ExpectedLoss(lambda theta, batch: -jnp.mean(log_density(theta, batch)))
    assert float(value) < float(bayes.value(mf.Empirical(X, WEIGHTS), CASES)) - 1e-3


def test_ranked_probability_score_is_the_integral_of_squared_differences():
    value = mf.RankedProbabilityScore(prediction).value(mf.Empirical(X, WEIGHTS), CASES)
    x, y, w = (np.asarray(a, np.float64) for a in (X, CASES, WEIGHTS))
    grid = np.linspace(-12, 12, 20_001)
    cdf = w @ stats.norm.cdf(grid[None], x[:, :1], 0.5 + 0.2 * x[:, 1:] ** 2)
    integrals = [np.sum((cdf - (grid >= case)) ** 2) * (grid[1] - grid[0]) for case in y]
    assert float(value) == pytest.approx(np.mean(integrals), abs=2e-3)


def test_kernel_score_is_mmd_to_each_observation():
    value = mf.KernelScore(prediction, mf.SquaredExponential(0.9)).value(mf.Empirical(X, WEIGHTS), CASES)
    rng = np.random.default_rng(3)
    shares = np.asarray(WEIGHTS, np.float64)
    members = rng.choice(7, size=(2, 400_000), p=shares / shares.sum())
    x = np.asarray(X, np.float64)[members]
    drawn = x[..., 0] + (0.5 + 0.2 * x[..., 1] ** 2) * rng.normal(size=members.shape)

    def kernel(difference):
        return np.exp(-(difference**2) / (2 * 0.81))

    own = kernel(drawn[0] - drawn[1])
    cross = np.mean([kernel(drawn[0] - case) for case in np.asarray(CASES, np.float64)], axis=0)
    found = own - 2 * cross + 1
    assert abs(float(value) - found.mean()) < 4 * found.std() / np.sqrt(found.size)


def test_moment():
    value = mf.Moment(squares, of_moments).value(mf.Empirical(X, WEIGHTS))
    x, w = np.asarray(X, np.float64), np.asarray(WEIGHTS, np.float64)
    assert_close(value, np.exp(0.3 * w @ x[:, 0]) + np.sum((w @ x**2) ** 2))


# ---- The identity: first variations and Wasserstein gradients, against differences of values. ----


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FUNCTIONALS)
def test_first_variation_is_the_derivative_along_mixtures(name):
    """d/dε G((1 − ε)Q + εδ(θᵢ)) at 0 is δG/δQ(θᵢ) − ∫ δG/δQ dQ."""
    functional, batch = FUNCTIONALS[name]
    measure = mf.Empirical(X, WEIGHTS)
    variation = np.asarray(functional.free_energy(batch).first_variation(measure))
    centred = variation - np.asarray(WEIGHTS) @ variation
    for i in (0, 3):
        towards = jax.nn.one_hot(i, 7)

        def along(epsilon, towards=towards):
            return functional.value(mf.Empirical(X, (1 - epsilon) * WEIGHTS + epsilon * towards), batch)

        assert_close(jax.jvp(along, (0.0,), (1.0,))[1], centred[i], 5e-5)
    assert np.ptp(centred) > 1e-3, "the test sees something"


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FUNCTIONALS)
def test_wasserstein_gradient_is_that_of_the_value(name):
    """(1/wᵢ) ∂G/∂θᵢ with equal weights, and the same through the fast path and through the rest."""
    functional, batch = FUNCTIONALS[name]
    found = functional.free_energy(batch).wasserstein_gradient(X)
    expected = 7 * jax.grad(lambda x: functional.value(mf.Empirical(x), batch))(X)
    assert_close(found, expected, 5e-5)
    rest = Everything(functional).free_energy(batch)
    assert rest.rest is not None
    assert rest.potential is None
    assert_close(rest.wasserstein_gradient(X), found, 5e-5)
    # Mutants: a lost 1/wᵢ, an interaction halved.
    assert np.abs(np.asarray(found / 7 - expected)).max() > 1e-3
    energy = functional.free_energy(batch)
    if energy.interaction is not None:
        halved = FreeEnergy(energy.potential, 0.5 * energy.interaction).wasserstein_gradient(X)
        assert np.abs(np.asarray(halved - expected)).max() > 1e-3


def test_functionals_add_and_are_weighted():
    functional, batch = FUNCTIONALS["log score"]
    whole = 0.25 * functional + 0.75 * FUNCTIONALS["CRPS"][0]
    parts = [
        0.25 * functional.value(mf.Empirical(X), batch),
        0.75 * FUNCTIONALS["CRPS"][0].value(mf.Empirical(X), batch),
    ]
    assert_close(whole.value(mf.Empirical(X), batch), sum(parts))
    problem = mf.Problem(whole, 0.1 * mf.KL(mf.Gaussian(jnp.zeros(2), 1.0)))
    energy = problem.free_energy(batch)
    assert energy.rest is not None
    assert energy.interaction is not None
    gradient = 7 * jax.grad(lambda x: whole.value(mf.Empirical(x), batch))(X) + 0.1 * X
    assert_close(problem.wasserstein_gradient(X, batch), gradient, 5e-5)


@pytest.mark.slow
def test_a_network_is_scored_by_its_likelihood():
    """The Bayes posterior and the predictively oriented one differ by one word; case weights count in
    both."""
    network = mf.Network.mlp(2, (3,), 2)
    loss = mf.NegativeLogLikelihood(network, mf.likelihoods.Heteroscedastic())
    particles = network.prior().sample(key(0), 4)
    inputs, targets, weights = X, X[:, 0], 2 * WEIGHTS
    log_p = np.stack(
        [
            np.asarray(
                loss.log_likelihood(jax.tree.map(lambda leaf, i=i: leaf[i], particles), (inputs, targets))
            )
            for i in range(4)
        ]
    )
    mixture = np.log(np.mean(np.exp(log_p), axis=0))
    measure = mf.Empirical(particles)
    assert_close(mf.LogScore(loss).value(measure, (inputs, targets)), -np.mean(mixture))
    weighted = mf.LogScore(loss).value(measure, (inputs, targets, weights))
    assert_close(weighted, -np.mean(np.asarray(weights) * mixture))
    assert_close(mf.ExpectedLoss(loss).value(measure, (inputs, targets)), -np.mean(log_p))
    for score in (mf.RankedProbabilityScore(loss), mf.KernelScore(loss, mf.SquaredExponential(1.0))):
        energy = score.free_energy((inputs, targets))
        found = energy.wasserstein_gradient(particles)
        expected = jax.grad(lambda p, s=score: 4 * s.value(mf.Empirical(p), (inputs, targets)))(particles)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(a, b, 5e-5)


# ---- What describe says. ----


class Mine(mf.AbstractFunctional):
    """(∫ θ dQ)², and nothing more is said of it."""

    def value(self, measure, batch=None):
        return jnp.sum(measure.integrate(lambda theta: theta) ** 2)


class Pull(mf.AbstractRegulariser):
    """A divergence of a user's own, with a reference."""

    reference: mf.AbstractMeasure

    def value(self, measure, batch=None):
        return jnp.sum((measure.integrate(lambda theta: theta) - self.reference.mean) ** 2)


def test_describe_asks_every_term_and_promises_nothing_it_does_not_know():
    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    text = mf.Problem(Mine(), 0.5 * mf.KL(prior)).describe()
    assert "1·Mine(Q)" in text
    assert "rest = 1·Mine(Q)" in text
    assert "convexity of Mine is not known" in text
    for promise in ("deep", "unique", "Theorem"):
        assert promise not in text
    text = mf.Problem(lambda theta: jnp.sum(theta**2), 2.0 * Pull(prior)).describe()
    assert "2·Pull(Q, Gaussian)" in text
    assert "deep ensemble" not in text
    text = mf.Problem(mf.LogScore(log_density), 0.1 * mf.KL(prior)).describe()
    assert "log score" in text
    assert "strictly convex" in text
    assert "τ    = 0.1" in text
    text = mf.Problem(mf.RankedProbabilityScore(prediction)).describe()
    assert "W    = −1·E|Y_θ − Y_θ′|" in text
    assert "convex" in text


# ---- Laws, on a grid. ----

GRID = np.linspace(-6, 6, 481)


def moments(density):
    cell = GRID[1] - GRID[0]
    mean = np.sum(density * GRID) * cell
    return mean, np.sum(density * (GRID - mean) ** 2) * cell


@pytest.mark.parametrize(
    ("tau", "expected"),
    [(0.1, 0.824), (0.01, 0.538), pytest.param(0.001, 0.505, marks=pytest.mark.slow)],
)
def test_the_log_score_finds_the_variance_that_the_model_lacks(tau, expected):
    """Data of variance s² = 1.5 under N(θ, 1): Q* → N(m, s² − 1) as τ → 0, where Bayes collapses."""
    n = 300
    y = stats.norm.ppf((np.arange(n) + 0.5) / n)
    y = jnp.asarray(0.3 + np.sqrt(1.5) * (y - y.mean()) / y.std())
    prior = mf.Gaussian(jnp.zeros(1), 2.5)
    score = mf.LogScore(lambda theta, batch: dist.Normal(theta[0], 1.0).log_prob(batch))
    problem = mf.Problem(score, tau * mf.KL(prior))
    density = mf.theory.minimiser(problem, GRID, batch=y)
    assert mf.theory.stationarity_residual(problem, GRID, density, batch=y) < 1e-8
    mean, variance = moments(density)
    assert mean == pytest.approx(0.3, abs=0.3 * tau)
    # The values were computed for another prior; as τ → 0 it loses its say.
    assert variance == pytest.approx(expected, abs=0.3 * tau + 5e-4)
    certificate = mf.theory.log_score_certificate(problem, GRID, density, batch=y)
    assert 0 <= certificate < tau
    # A mutant with weights 1 is Bayes, with its variance about τ: far from this.
    bayes = mf.Problem(
        lambda theta, batch: -jnp.mean(dist.Normal(theta[0], 1.0).log_prob(batch)), tau * mf.KL(prior)
    )
    assert moments(mf.theory.minimiser(bayes, GRID, batch=y))[1] < 1.1 * tau


def test_a_moment_of_linear_features_has_the_ridge_mean_and_the_priors_covariance():
    """φ(∫θ dQ) = ‖y − x∫θ dQ‖²/2n with τKL to N(0, s²): q* = N(ridge, s²)."""
    x, y, tau, scale = np.array([1.0, -0.5, 2.0]), np.array([1.2, 0.1, 1.7]), 0.4, 0.8

    def squared_error(mean, batch):
        return 0.5 * jnp.mean((batch[1] - batch[0] * mean) ** 2)

    moment = mf.Moment(lambda theta, batch: theta[0], squared_error)
    problem = mf.Problem(moment, tau * mf.KL(mf.Gaussian(jnp.zeros(1), scale)))
    batch = (jnp.asarray(x), jnp.asarray(y))
    density = mf.theory.minimiser(problem, GRID, batch=batch)
    mean, variance = moments(density)
    ridge = np.mean(x * y) / (np.mean(x**2) + tau / scale**2)
    assert mean == pytest.approx(ridge, abs=1e-6)
    assert variance == pytest.approx(scale**2, rel=1e-4)
    # ∂/∂w of the log score's mutant, weights forgotten, would make it the Gibbs measure of ℓ: narrower.
    assert abs(variance - 1 / (1 / scale**2 + np.mean(x**2) / tau)) > 0.1


def test_particles_reach_the_moments_law():
    """The flow through the rest, in standard errors of independent draws from q*."""
    x, y, tau, scale = np.array([1.0, -0.5, 2.0]), np.array([1.2, 0.1, 1.7]), 0.4, 0.8
    n, eta = 4_000, 0.02

    def squared_error(mean, batch):
        return 0.5 * jnp.mean((batch[1] - batch[0] * mean) ** 2)

    moment = mf.Moment(lambda theta, batch: theta[0], squared_error)
    problem = mf.Problem(moment, tau * mf.KL(mf.Gaussian(jnp.zeros(1), scale)))
    batch = (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    solution = mf.solve(problem, mf.WassersteinFlow(eta), jnp.zeros((n, 1)), 1_500, key(2), data=batch)
    particles = np.asarray(solution.measure.particles[:, 0], np.float64)
    ridge = np.mean(x * y) / (np.mean(x**2) + tau / scale**2)
    # The discrete chain's own variance in the prior's pull of slope τ/s².
    variance = scale**2 / (1 - 0.5 * eta * tau / scale**2)
    assert abs(particles.mean() - ridge) < 4 * np.sqrt(variance / n)
    assert abs(particles.var() / variance - 1) < 4 * np.sqrt(2 / n)
    # Noise of half or twice the variance, no prior, and the Gibbs measure of ℓ are other laws.
    assert abs(particles.mean() - np.mean(x * y) / np.mean(x**2)) > 8 * np.sqrt(variance / n)
    for wrong in (variance / 2, 2 * variance, 1 / (1 / scale**2 + np.mean(x**2) / tau)):
        assert abs(particles.var() / wrong - 1) > 8 * np.sqrt(2 / n)


def test_quadratic_scores_have_one_minimiser_both_ways():
    """Through (V, W) and through the rest, on the grid, to rounding."""
    y = jnp.asarray([-0.7, 0.2, 0.9, 1.4])

    def laws(theta, batch):
        return dist.Normal(jnp.broadcast_to(theta[0], batch.shape), 0.4), batch

    prior = mf.Gaussian(jnp.zeros(1), 1.0)
    grid = np.linspace(-4, 4, 161)
    for score in (mf.RankedProbabilityScore(laws), mf.KernelScore(laws, mf.SquaredExponential(0.6))):
        fast = mf.theory.minimiser(mf.Problem(score, 0.05 * mf.KL(prior)), grid, batch=y)
        rest = mf.theory.minimiser(mf.Problem(Everything(score), 0.05 * mf.KL(prior)), grid, batch=y)
        np.testing.assert_allclose(fast, rest, atol=1e-6)
        # An interaction halved is another law.
        halved = mf.Problem(Halved(score), 0.05 * mf.KL(prior))
        assert np.abs(mf.theory.minimiser(halved, grid, batch=y) - fast).max() > 1e-2


class Halved(mf.AbstractFunctional):
    functional: mf.AbstractFunctional

    def value(self, measure, batch=None):
        return self.functional.value(measure, batch)

    def free_energy(self, batch=None):
        energy = self.functional.free_energy(batch)
        return FreeEnergy(energy.potential, 0.5 * energy.interaction)


@pytest.mark.slow
def test_without_temperature_the_gap_closes():
    y = jnp.asarray(np.random.default_rng(1).normal(0, 1.5, 40))
    score = mf.LogScore(lambda theta, batch: dist.Normal(theta[0], 1.0).log_prob(batch))
    grid = np.linspace(-5, 5, 101)
    density = mf.theory.minimiser(mf.Problem(score), grid, batch=y)
    assert 0 <= mf.theory.log_score_certificate(mf.Problem(score), grid, density, batch=y) < 1e-4


def test_the_certificate_is_for_the_log_score():
    with pytest.raises(TypeError, match="objective is a LogScore, got moment"):
        mf.theory.log_score_certificate(mf.Problem(mf.Moment(squares, of_moments)), GRID, np.ones(481))


# ---- Bad input. ----


class Vector(mf.AbstractFunctional):
    def value(self, measure, batch=None):
        return measure.integrate(lambda theta: theta)


class Integer(mf.AbstractFunctional):
    def value(self, measure, batch=None):
        return 3


class Unweighted(mf.AbstractFunctional):
    def value(self, measure, batch=None):
        return jnp.mean(measure.particles) ** 2


class Infinite(mf.AbstractFunctional):
    def value(self, measure, batch=None):
        return jnp.log(jnp.sum(measure.integrate(lambda theta: 0.0 * theta)))


@pytest.mark.parametrize(
    ("functional", "message"),
    [
        (Vector(), r"Vector.value must return a scalar, got shape \(2,\)"),
        (Integer(), "Integer.value must return a floating-point scalar, got int"),
        (Unweighted(), "Unweighted.value does not depend on measure.weights.*measure.integrate"),
        (Infinite(), "Infinite is -inf at `initial`, step 0"),
        (mf.LogScore(lambda theta: jnp.sum(theta)), r"shape \(cases,\), got shape \(\)"),
        (
            mf.Moment(squares, lambda mean: mean["all"]),
            r"Moment function must return a scalar, got shape \(2,\)",
        ),
    ],
)
def test_functionals_that_are_none(functional, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mf.solve(mf.Problem(functional), mf.WassersteinFlow(1e-2), X, 3, key(0))


def test_a_regulariser_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match="functional of the regulariser is -inf at `initial`"):
        mf.solve(mf.Problem(jnp.sum, 1.0 * Infinite()), mf.WassersteinFlow(1e-2), X, 3, key(0))


def test_batches_of_particles_in_a_nonlinear_functional_are_refused():
    flow = mf.WassersteinFlow(1e-2, interactions=mf.RandomBatches(7))
    with pytest.raises(ValueError, match="nonlinear functional of them is biased"):
        mf.solve(mf.Problem(Mine()), flow, X, 3, key(0))
    # Quadratic ones are unbiased.
    problem = mf.Problem(mf.RankedProbabilityScore(prediction))
    mf.solve(problem, flow, X, 3, key(0), data=CASES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mf.LogScore(3.0), "LogScore takes a NegativeLogLikelihood"),
        (lambda: mf.Moment(3.0, jnp.sum), "Moment features must be a function, got 3.0"),
        (lambda: mf.KernelScore(prediction, mf.Matern(0.5, 1.0)), "must be a SquaredExponential"),
        (lambda: mf.KL(), "KL reference must be a measure, got None"),
        (lambda: mf.SquaredMMD(), "SquaredMMD takes"),
        (lambda: mf.KL(mf.Flat()) + 3.0, "only functionals can be added to KL, got 3.0"),
        (lambda: -1.0 * mf.LogScore(log_density), "log score weight must be > 0"),
        (lambda: mf.Problem(jnp.sum, mf.KL), "regulariser must be built from functionals"),
        (lambda: mf.Empirical(X, WEIGHTS[:3]), r"weights have shape \(3,\), but there are 7 particles"),
        (lambda: mf.Empirical(X, WEIGHTS.at[0].set(0.0)), "weights must be > 0 and finite"),
        (lambda: mf.Empirical(X, -WEIGHTS), "weights must be > 0 and finite"),
        (lambda: mf.Empirical(X, WEIGHTS).entropy(), "with weights cannot be estimated"),
    ],
)
@pytest.mark.usefixtures("as_a_user_runs_it")
def test_bad_statements(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_loss_without_its_data_says_so():
    def loss(theta, batch):
        return jnp.mean((batch - theta[0]) ** 2)

    flow = mf.WassersteinFlow(1e-2)
    with pytest.raises(TypeError, match=r"loss cannot be called as loss\(θ\): missing.*pass data="):
        mf.solve(mf.Problem(loss), flow, X, 3, key(0))
    with pytest.raises(TypeError, match=r"loss cannot be called as loss\(θ, batch\).*leave data= out"):
        mf.solve(mf.Problem(lambda theta: jnp.sum(theta**2)), flow, X, 3, key(0), data=CASES)


def test_a_log_density_is_not_taken_for_a_loss():
    def log_prob(theta):
        return -jnp.sum(theta**2)

    with pytest.warns(UserWarning, match="function called log_prob, and a loss is minimised"):
        problem = mf.Problem(log_prob)
    with pytest.raises(mf.DivergenceError, match="if it is a log density, pass its negative"):
        mf.solve(problem, mf.WassersteinFlow(1.0), X, 500, key(0))


# ---- As part of a run. ----


@pytest.mark.parametrize("name", ["log score", "CRPS", "kernel score"])
def test_batches_of_cases_are_unbiased(name):
    """The mean gradient over all batches of an epoch is that of the whole, since a score is a mean over
    cases."""
    functional, _ = FUNCTIONALS[name]
    problem = mf.Problem(functional)
    halves = [problem.wasserstein_gradient(X, half) for half in (CASES[:6], CASES[6:])]
    assert_close((halves[0] + halves[1]) / 2, problem.wasserstein_gradient(X, CASES), 5e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["log score", "CRPS", "moment"])
def test_runs_continue_exactly_and_side_by_side(name):
    functional, cases = FUNCTIONALS[name]
    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    data, size = (None, None) if cases is None else (CASES, 4)
    flow = mf.WassersteinFlow(1e-2)

    def solved(start, steps):
        problem = mf.Problem(functional, 0.1 * mf.KL(prior))
        return mf.solve(problem, flow, start, steps, key(3), data=data, batch_size=size)

    whole, part = solved(X, 30), solved(X, 13)
    np.testing.assert_array_equal(solved(part.state, 17).measure.particles, whole.measure.particles)

    def ran(weight):
        problem = mf.Problem(functional, weight * mf.KL(prior))
        state = flow.init(problem, X)
        return mf.run(problem, flow, state, data, key(3), 30, batch_size=size).particles

    together = jax.jit(jax.vmap(ran))(jnp.array([0.1, 1.0]))
    assert_close(together[0], whole.measure.particles, 1e-4)
    assert np.abs(np.asarray(together[1] - together[0])).max() > 1e-3


# ---- Weighted measures. ----


def test_weights_are_those_of_the_measure():
    measure = mf.Empirical(X, 10 * WEIGHTS)
    assert_close(jnp.sum(measure.weights), 1.0)
    assert_close(measure.integrate(lambda theta: theta), WEIGHTS @ X, 5e-5)
    drawn = measure.sample(key(4), 40_000)
    share = np.mean(np.all(np.asarray(drawn) == np.asarray(X[0]), axis=1))
    assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 40_000)
    gaussian = measure.moment_matched()
    mean = np.asarray(WEIGHTS) @ np.asarray(X)
    assert_close(gaussian.mean, mean, 5e-5)
    assert_close(gaussian.scale, np.sqrt(np.asarray(WEIGHTS) @ (np.asarray(X) - mean) ** 2), 5e-5)
    kernel = mf.SquaredExponential(0.8)
    gram = np.exp(-((np.asarray(X)[:, None] - np.asarray(X)[None]) ** 2).sum(-1) / (2 * 0.64))
    reference = mf.Empirical(X[:3])
    value = mf.SquaredMMD(reference, kernel).value(measure)
    w, third = np.asarray(WEIGHTS), np.full(3, 1 / 3)
    expected = w @ gram @ w - 2 * w @ gram[:, :3] @ third + third @ gram[:3, :3] @ third
    assert_close(value, expected, 5e-5)
    assert "weighted" in repr(measure)


def test_a_sum_is_a_module_like_any_other():
    whole = 0.5 * mf.LogScore(log_density) + mf.ExpectedLoss(lambda theta, batch: theta[0])
    assert len(jax.tree.leaves(eqx.filter(whole, eqx.is_array))) == 2
