"""L(Q) = ∫ℓ dQ + Σ w D(Q, P): its value, its words, and the four named ensembles."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from helpers import assert_within, draw, jit, key, rows
from helpers import squared_distances as distances
from scipy.special import erfcx

import measureflow as mf

PRIOR = mf.Gaussian(jnp.zeros(1), 1.0)
SE = mf.SquaredExponential(0.9)
MEASURE = mf.Gaussian(jnp.array([0.5]), jnp.array([0.8]))


def quartic(theta):
    return jnp.sum(theta**4)


def square(theta):
    return 0.5 * jnp.sum(theta**2)


def nothing(theta):
    return jnp.zeros(())


def normal_moment(mean, deviation):
    """E θ⁴."""
    return mean**4 + 6 * mean**2 * deviation**2 + 3 * deviation**4


def exact_mmd(mean, deviation):
    """MMD² of N(mean, deviation²) and N(0, 1) for the squared exponential with σ = 0.9."""

    def overlap(m, v):
        return 0.9 / np.sqrt(0.81 + v) * np.exp(-0.5 * m**2 / (0.81 + v))

    return overlap(0, 2 * deviation**2) - 2 * overlap(mean, deviation**2 + 1) + overlap(0, 2)


def exact_kl(mean, deviation):
    return 0.5 * (deviation**2 + mean**2 - 1) - np.log(deviation)


def test_value_of_a_gaussian():
    """Quadrature where no key is given, Monte Carlo where one is; divergences are closed forms in both."""
    problem = mf.Problem(quartic, 0.4 * mf.SquaredMMD(PRIOR, SE) + 0.3 * mf.KL(PRIOR))
    exact = {
        "loss": normal_moment(0.5, 0.8),
        "MMD²": 0.4 * exact_mmd(0.5, 0.8),
        "KL": 0.3 * exact_kl(0.5, 0.8),
    }
    parts = problem.value_parts(MEASURE)
    assert set(parts) == set(exact)
    for name, value in exact.items():
        np.testing.assert_allclose(parts[name], value, rtol=2e-5)
    np.testing.assert_allclose(problem.value(MEASURE), sum(exact.values()), rtol=2e-5)

    estimate = problem.value_parts(MEASURE, key=key(1), samples=20_000)
    x = 0.5 + 0.8 * np.random.default_rng(0).normal(size=100_000)
    assert_within(estimate["loss"], exact["loss"], np.std(x**4) / np.sqrt(20_000))
    assert float(estimate["loss"]) != float(parts["loss"])
    for name in ("KL", "MMD²"):
        np.testing.assert_allclose(estimate[name], exact[name], rtol=2e-5)


def test_value_of_a_gaussian_in_two_and_more_dimensions():
    factor = np.array([[0.8, 0.0], [0.5, 0.6]])
    measure = mf.Gaussian({"a": jnp.array([0.5]), "b": jnp.array(-1.0)}, jnp.asarray(factor, jnp.float32))
    problem = mf.Problem(lambda theta: jnp.sum(theta["a"]) * theta["b"] ** 2)
    covariance = factor @ factor.T
    # E[ab²] = m_a (m_b² + Σ_bb) + 2 m_b Σ_ab.
    exact = 0.5 * (1 + covariance[1, 1]) - 2 * covariance[0, 1]
    np.testing.assert_allclose(problem.value(measure), exact, rtol=1e-4)
    three = mf.Gaussian(jnp.ones(3), 0.5)
    with pytest.raises(ValueError, match=r"Gaussian in 3 dimensions.*key="):
        mf.Problem(square).value(three)
    # ½‖θ‖² has mean ½·3·1.25 and variance ½·3·σ⁴ + 3·σ²m².
    error = np.sqrt((1.5 * 0.5**4 + 3 * 0.25) / 5000)
    assert_within(mf.Problem(square).value(three, key=key(), samples=5000), 1.875, error)


def test_value_of_a_gaussian_where_the_kernel_has_a_cusp():
    """∬ exp(−|x − y|/ℓ) dQdQ = erfcx(s/ℓ) for Q = N(m, s²)."""
    problem = mf.Problem(nothing, 1.0 * mf.SquaredMMD(mf.Flat(), mf.Matern(0.5, 0.3)))
    exact = erfcx(0.8 / 0.3)
    # With a key, a U-statistic: its variance is 4/n times that of x ↦ ∫κ(x, ·) dQ.
    x = 0.5 + 0.8 * np.random.default_rng(0).normal(size=2000)
    spread = np.std(np.mean(np.exp(-np.abs(x[:, None] - x[None]) / 0.3), axis=1))
    assert_within(problem.value(MEASURE, key=key(), samples=4000), exact, 2 * spread / np.sqrt(4000))
    # Quadrature misses a cusp, so without a key there is no answer.
    with pytest.raises(ValueError, match=r"no closed form for .* pass key="):
        problem.value(MEASURE)


def test_value_of_particles():
    x = np.random.default_rng(0).normal(1.0, 0.5, size=(2000, 1))
    particles = jnp.asarray(x, jnp.float32)
    problem = mf.Problem(quartic, 0.4 * mf.SquaredMMD(PRIOR, SE) + 0.3 * mf.KL(PRIOR) + 0.2 * mf.KL(PRIOR))
    parts = problem.value_parts(mf.Empirical(particles))
    np.testing.assert_allclose(parts["loss"], np.mean(x**4), rtol=1e-5)
    # MMD² of the particles themselves, exactly: ∬κ dPdP and μ_P are Gaussian integrals.
    embedding = 0.9 / np.sqrt(1.81) * np.exp(-(x**2) / (2 * 1.81))
    own = np.exp(-distances(x, x) / 1.62).mean()
    exact = 0.4 * (own - 2 * embedding.mean() + 0.9 / np.sqrt(2.81))
    np.testing.assert_allclose(parts["MMD²"], exact, rtol=1e-4)
    # KL needs the entropy; its error is that of a mean of log q/p plus the estimator's own ψ′(5).
    ratio = st.norm(1.0, 0.5).logpdf(x) - st.norm.logpdf(x)
    assert_within(parts["KL"] / 0.5, exact_kl(1.0, 0.5), np.sqrt((np.var(ratio) + 0.22) / len(x)))
    np.testing.assert_allclose(
        problem.value(mf.Empirical(particles)), sum(map(float, parts.values())), rtol=1e-6
    )


def test_value_on_a_batch():
    problem = mf.Problem(lambda theta, batch: jnp.mean(batch) * jnp.sum(theta))
    value = problem.value(mf.Empirical(jnp.array([[1.0], [4.0]])), jnp.array([1.0, 2.0, 6.0]))
    np.testing.assert_allclose(value, 3 * 2.5)


def test_flat_references_leave_their_infinite_constants_out():
    problem = mf.Problem(square, 0.5 * mf.KL(mf.Flat()) + 2.0 * mf.SquaredMMD(mf.Flat(), SE))
    parts = problem.value_parts(MEASURE)
    np.testing.assert_allclose(parts["KL"], -0.5 * st.norm(0.5, 0.8).entropy(), rtol=1e-5)
    np.testing.assert_allclose(parts["MMD²"], 2 * 0.9 / np.sqrt(0.81 + 2 * 0.64), rtol=1e-5)
    x = draw({"x": (2,)}, 100)["x"]
    parts = problem.value_parts(mf.Empirical(x))
    np.testing.assert_allclose(
        parts["MMD²"], 2 * np.exp(-distances(rows(x), rows(x)) / 1.62).mean(), rtol=1e-5
    )
    assert problem.template() is None


def test_free_energy_is_the_objective_up_to_a_constant():
    """∫V + ½∬W + w∬κ dPdP = ∫ℓ + w·MMD² on particles."""
    x = draw({"x": (1,)}, 20)["x"]
    problem = mf.Problem(quartic, 0.4 * mf.SquaredMMD(PRIOR, SE))
    energy = problem.free_energy()
    free = float(energy.potential_energy(x) + energy.interaction_energy(x))
    np.testing.assert_allclose(free + 0.4 * 0.9 / np.sqrt(2.81), problem.value(mf.Empirical(x)), rtol=1e-5)
    assert energy.temperature is None
    assert mf.Problem(quartic).free_energy().interaction is None


DE = mf.deep_ensemble(square)
DLE = mf.deep_langevin_ensemble(square, PRIOR, kl=0.25)
DRE = mf.deep_repulsive_ensemble(square, PRIOR, SE, mmd=0.5)
DRLE = mf.deep_repulsive_langevin_ensemble(square, PRIOR, SE, mmd=0.5, kl=0.25)


@pytest.mark.parametrize(
    ("named", "stated", "temperature", "interaction"),
    [
        (DE, mf.Problem(square), None, None),
        (DLE, mf.Problem(square, 0.25 * mf.KL(PRIOR)), 0.25, None),
        (DRE, mf.Problem(square, 0.5 * mf.SquaredMMD(PRIOR, SE)), None, 1.0),
        (DRLE, mf.Problem(square, 0.5 * mf.SquaredMMD(PRIOR, SE) + 0.25 * mf.KL(PRIOR)), 0.25, 1.0),
    ],
    ids=["DE", "DLE", "DRE", "DRLE"],
)
def test_named_ensembles(named, stated, temperature, interaction):
    assert eqx.tree_equal(named, stated)
    energy, zero = named.free_energy(), jnp.zeros(1)
    assert energy.temperature == temperature
    assert (energy.interaction and float(energy.interaction(zero, zero))) == interaction


CLAIMS = {
    "The minimiser is not unique",
    "is unique:",
    "unique if κ is characteristic",
    "do not reach it:",
    "do not reach it in general",
    "Particles reach it, independently",
    "Particles reach it as N → ∞",
    "P is flat",
    "left out of L",
    "P is proper (Gaussian): holds",
    "): holds; without it",
    "σ=0.9)): holds.",
    "not known to hold",
    "N = 1",
}
UNIQUE_LANGEVIN = {"is unique:", "Particles reach it, independently", "P is proper (Gaussian): holds"}
REPULSIVE = {
    "unique if κ is characteristic",
    "do not reach it in general",
    "P is proper (Gaussian): holds",
    "N = 1",
}
MCKEAN_VLASOV = {"is unique:", "Particles reach it as N → ∞", "N = 1"}


@pytest.mark.parametrize(
    ("problem", "normal_form", "claims"),
    [
        (DE, "DE: ∫ ℓ dQ | ℓ | 0 | 0", {"The minimiser is not unique", "do not reach it:"}),
        (DLE, "DLE: ∫ ℓ dQ + 0.25·KL(Q, Gaussian) | ℓ − 0.25·log p | 0 | 0.25", UNIQUE_LANGEVIN),
        (
            DRE,
            "DRE: ∫ ℓ dQ + 0.5·MMD²(Q, Gaussian) | ℓ − 1·μ_P | 1·SquaredExponential(σ=0.9) | 0",
            REPULSIVE | {"): holds; without it"},
        ),
        (
            DRLE,
            "DRLE: ∫ ℓ dQ + 0.5·MMD²(Q, Gaussian) + 0.25·KL(Q, Gaussian) | ℓ − 1·μ_P − 0.25·log p | "
            "1·SquaredExponential(σ=0.9) | 0.25",
            MCKEAN_VLASOV | {"P is proper (Gaussian): holds", "σ=0.9)): holds."},
        ),
        (
            mf.deep_repulsive_langevin_ensemble(square, mf.Flat(), mf.Matern(1.5, 2.0), mmd=1.0, kl=0.5),
            "DRLE: ∫ ℓ dQ + 1·MMD²(Q, Flat) + 0.5·KL(Q, Flat) | ℓ | 2·Matern-1.5(σ=2) | 0.5",
            MCKEAN_VLASOV | {"P is flat", "left out of L"},
        ),
        (
            mf.deep_repulsive_ensemble(square, PRIOR, SE.on(lambda theta: theta[:1]), mmd=0.5),
            "DRE: ∫ ℓ dQ + 0.5·MMD²(Q, Gaussian) | ℓ − 1·μ_P | 1·SquaredExponential(σ=0.9)∘f | 0",
            REPULSIVE | {"not known to hold"},
        ),
        (
            mf.deep_repulsive_ensemble(square, PRIOR, 2.0 * SE.on(mf.Whiten(PRIOR)) + SE, mmd=0.5),
            "DRE: ∫ ℓ dQ + 0.5·MMD²(Q, Gaussian) | ℓ − 1·μ_P | "
            "1·(2·SquaredExponential(σ=0.9)∘f + 1·SquaredExponential(σ=0.9)) | 0",
            REPULSIVE | {"): holds; without it"},
        ),
    ],
    ids=["DE", "DLE", "DRE", "DRLE", "flat", "pull-back", "whitened sum"],
)
def test_describe(problem, normal_form, claims):
    """The normal form to the letter; and each claim where it holds, and nowhere else."""
    text = problem.describe()
    name, *parts = [line.split(" = ")[-1].strip() for line in text.splitlines()[:5]]
    assert f"{name.split('(')[1][:-1]}: {' | '.join(parts)}" == normal_form
    assert {claim for claim in CLAIMS if claim in text} == claims


def test_describe_while_weights_are_traced():
    texts = []

    @jax.jit
    def trace(weight):
        texts.append(mf.deep_langevin_ensemble(square, PRIOR, kl=weight).describe())
        return weight

    trace(jnp.float32(0.5))
    assert "w·KL(Q, Gaussian)" in texts[0]


def naive_stein(particles, score, scale):
    """√ mean of u(x, y) by autodiff of the inverse multiquadric, pair by pair."""

    def kappa(x, y):
        return 1 / jnp.sqrt(1 + jnp.sum((x - y) ** 2) / scale**2)

    def u(x, y, sx, sy):
        first, second = jax.grad(kappa, argnums=(0, 1))(x, y)
        mixed = jnp.trace(jax.jacfwd(jax.grad(kappa, argnums=1))(x, y))
        return sx @ sy * kappa(x, y) + sx @ second + sy @ first + mixed

    pairs = jax.vmap(jax.vmap(u, (None, 0, None, 0)), (0, None, 0, None))
    return jnp.sqrt(jnp.mean(pairs(particles, particles, score, score)))


def test_stationarity_is_the_stein_discrepancy_of_the_particles():
    prior = mf.Gaussian(jnp.zeros(2), 1.0)
    problem = mf.deep_repulsive_langevin_ensemble(square, prior, SE, mmd=0.5, kl=0.25)
    x = draw({"x": (2,)}, 10)["x"]
    points = rows(x)
    # ∇V = θ + τθ − 2w∇μ_P, W = 2wκ; μ_P is a Gaussian bump of variance 1.81.
    bump = 0.81 / 1.81 * np.exp(-np.sum(points**2, axis=1) / 3.62)
    difference = points[:, None] - points[None]
    slope = -np.exp(-np.sum(difference**2, axis=-1) / 1.62) / 0.81
    gradient = 1.25 * points + bump[:, None] * points / 1.81 + np.mean(slope[:, :, None] * difference, axis=1)
    # In coordinates z that the particles whiten: θ = m + L z, with the score Lᵀs.
    root = np.linalg.cholesky(np.cov(points.T, bias=True))
    z = (points - points.mean(axis=0)) @ np.linalg.inv(root).T
    scale = np.sqrt(np.median(distances(z, z)[np.triu_indices(10, 1)]) / 2)
    white, score = (jnp.asarray(rows, jnp.float32) for rows in (z, -gradient / 0.25 @ root))
    np.testing.assert_allclose(problem.stationarity(x), jit(naive_stein)(white, score, scale), rtol=1e-4)
    # Without a temperature, it is the norm of the gradient.
    norm = np.sqrt(np.mean(np.sum(points**2, axis=1)))
    np.testing.assert_allclose(DE.stationarity(x), norm, rtol=1e-5)


# ---- Values of a Gaussian: integrals that are resolved, or an error. ----


@pytest.mark.parametrize(
    ("function", "scale", "expected"),
    [
        (lambda theta: jnp.sum(jnp.sin(8 * theta) ** 2), 1.0, 0.5 * (1 - np.exp(-128.0))),
        (mf.theory.many_modes_loss, 10.0, -2 / np.pi),
        (lambda theta: jnp.sum(jnp.exp(theta) - theta), 6.0, np.exp(18.0)),
        (lambda theta: jnp.sum(jnp.exp(theta) - theta), 1.0, np.exp(0.5)),
        (lambda theta: jnp.sum(theta**4), 2.0, 48.0),
    ],
)
def test_integrals_over_a_gaussian_are_resolved(function, scale, expected):
    value = mf.Problem(function).value(mf.Gaussian(jnp.zeros(1), scale))
    # Two rules that agree within 1e-4; |sin|, with its kinks, within a few of that.
    assert float(value) == pytest.approx(expected, rel=5e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda theta: jnp.sum(jnp.where(theta > 0.3, 1.0, 0.0)),
        lambda theta: jnp.sum(jnp.exp(theta**2)),
        lambda theta: jnp.sum(jnp.where(theta > 4.0, jnp.nan, theta)),
    ],
)
def test_a_value_that_two_rules_disagree_on_is_refused(function):
    problem, measure = mf.Problem(function), mf.Gaussian(jnp.zeros(1), 1.0)
    with pytest.raises(ValueError, match=r"does not resolve the loss .* two rules give .* pass key="):
        problem.value(measure)


def test_monte_carlo_is_the_remedy():
    def beyond(theta):
        return jnp.sum(jnp.where(theta > 0.3, 1.0, 0.0))

    value = mf.Problem(beyond).value(mf.Gaussian(jnp.zeros(1), 1.0), key=jax.random.key(0), samples=100_000)
    assert abs(float(value) - 0.38209) < 4 * 0.486 / np.sqrt(100_000)


def test_two_dimensions_are_resolved_too():
    measure = mf.Gaussian(jnp.zeros(2), jnp.array([1.0, 2.0]))
    value = mf.Problem(lambda theta: jnp.cos(theta[0] * theta[1])).value(measure)
    # E cos(XY) of independent normals is 1/√(1 + σ₁²σ₂²).
    assert float(value) == pytest.approx(1 / np.sqrt(5.0), rel=1e-4)
