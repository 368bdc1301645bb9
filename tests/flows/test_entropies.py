"""Entropy without noise: authors' formulas on fixed particles, and stationary variances known exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats as st
from helpers import SMALL, Inner, assert_close, draw, jit, key, rows
from helpers import squared_distances as distances

import measureflow as mf
from measureflow.numerics import pair_sums
from measureflow.numerics.interactions import EXACT

SCALE = 0.9
KERNEL = mf.SquaredExponential(SCALE)
PARTICLES = draw(SMALL, 9)


def score(entropy, particles=PARTICLES):
    return jit(lambda x: entropy.score(x, EXACT))(particles)


# ---- The authors' formulas. ----


def log_density(kernel, theta, particles):
    return jnp.log(jnp.mean(jax.vmap(lambda other: kernel(theta, other))(particles)))


@pytest.mark.parametrize("kernel", [KERNEL, Inner()], ids=["radial", "any"])
def test_kernel_density_is_the_gradient_of_its_logarithm(kernel):
    particles = PARTICLES if kernel is KERNEL else PARTICLES["vector"]
    at = jax.vmap(jax.grad(lambda theta, others: log_density(kernel, theta, others)), (0, None))
    found = score(mf.KernelDensity(kernel), particles)
    assert_close(rows(found), rows(jit(at)(particles, particles)))


def test_blob_is_the_gradient_of_its_entropy():
    """N ∂/∂θᵢ of (1/N) Σᵢ log (1/N) Σⱼ k(θᵢ, θⱼ), by autodiff; without the second sum it is not."""

    def entropy(particles):
        return jnp.sum(jax.vmap(lambda theta: log_density(KERNEL, theta, particles))(particles))

    expected = rows(jit(jax.grad(entropy))(PARTICLES))
    assert_close(rows(score(mf.Blob(KERNEL))), expected)
    assert np.max(np.abs(rows(score(mf.KernelDensity(KERNEL))) - expected)) > 0.1


def gram_and_slopes(x):
    """K, and Σⱼ ∇₁k(xⱼ, xᵢ), in float64."""
    gram = np.exp(-distances(x, x) / (2 * SCALE**2))
    return gram, -np.einsum("ji,jic->ic", gram, x[:, None] - x[None]) / SCALE**2


@pytest.mark.parametrize("ridge", [0.01])
def test_stein_gradient_estimator(ridge):
    """Li and Turner (2018), equation 8: −(K + ηI)⁻¹⟨∇, K⟩."""
    gram, slopes = gram_and_slopes(rows(PARTICLES))
    expected = -np.linalg.solve(gram + ridge * np.eye(9), slopes)
    found = rows(score(mf.SteinGradientEstimator(KERNEL, ridge)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert np.max(np.abs(found + expected)) > 0.1, "the sign is seen"


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_spectral_stein_gradient_estimator(share):
    """Shi, Sun and Zhu (2018), as they write it: eigenfunctions by Nyström, coefficients by their mean
    gradients."""
    x = rows(PARTICLES)
    gram, _ = gram_and_slopes(x)
    n, (values, vectors) = len(x), np.linalg.eigh(gram)
    order = np.argsort(-values)
    number = int(np.argmax(np.cumsum(values[order]) / values.sum() > share)) + 1
    assert 1 < number < n
    expected = np.zeros_like(x)
    for m in order[:number]:
        psi = np.sqrt(n) / values[m] * gram @ vectors[:, m]
        slopes = -gram[:, :, None] * (x[:, None] - x[None]) / SCALE**2  # ∇₁k(xᵢ, xⱼ)
        gradients = np.sqrt(n) / values[m] * np.einsum("j,ijc->ic", vectors[:, m], slopes)
        expected += psi[:, None] * -gradients.mean(axis=0)
    found = rows(score(mf.SpectralSteinGradientEstimator(KERNEL, share)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_functions_are_repelled_through_their_features():
    """f-WGD: Df(θ)ᵀ times the score of f(θ), for every estimate."""

    def features(theta):
        return jnp.sin(theta["vector"]) * theta["scalar"]

    values, pull_back = jax.vjp(jax.vmap(features), PARTICLES)
    for kind in (mf.Blob, mf.SteinGradientEstimator):
        (expected,) = pull_back(score(kind(KERNEL), values))
        assert_close(rows(score(kind(KERNEL.on(features)))), rows(expected))


def test_tiles_are_the_whole(monkeypatch):
    whole = rows(score(mf.Blob(KERNEL)))
    monkeypatch.setattr(pair_sums, "_ROWS", 4)
    monkeypatch.setattr(pair_sums, "_COLUMNS", 4)
    assert_close(rows(score(mf.Blob(KERNEL))), whole)


# ---- Exact laws. ----

H = 0.5
NORMAL = mf.Problem(lambda theta: 0.5 * jnp.sum(theta**2), 1.0 * mf.KL(mf.Flat()))


def stationary_variance(entropy, n, steps=400):
    start = jnp.asarray(2 * st.norm.ppf((np.arange(n) + 0.5) / n) + 0.5, jnp.float32)[:, None]
    flow = mf.WassersteinFlow(0.2, entropy=entropy)
    end = jit(lambda x: mf.run(NORMAL, flow, flow.init(NORMAL, x), None, key(0), steps).particles)(start)
    assert abs(float(jnp.mean(end))) < 1e-3
    return float(jnp.var(end))


@pytest.mark.parametrize("kind", [mf.KernelDensity, mf.Blob])
def test_stationary_variance(kind):
    """Of N(0, 1): σ² − h² for a density; for a blob s − h², s² − s − h² = 0. Particles miss it by c/N, which
    two numbers of them cancel."""
    law = {mf.KernelDensity: 1 - H**2, mf.Blob: (1 + np.sqrt(1 + 4 * H**2)) / 2 - H**2}
    few, many = (stationary_variance(kind(mf.SquaredExponential(H)), n) for n in (50, 200))
    assert abs(many - law[kind]) < 2 / 200
    measured = (4 * many - few) / 3
    assert abs(measured - law[kind]) < 1e-3
    # Twice or half of h², the other estimate, and the target itself are other laws.
    other = law[mf.Blob if kind is mf.KernelDensity else mf.KernelDensity]
    for wrong in (1.0, 1 - 2 * H**2, 1 - H**2 / 2, other):
        assert abs(measured - wrong) > 0.02


def test_moments_of_the_blob_of_a_gaussian():
    """∫ x·∇ dq of the blob's entropy is d/dε of its value under x ↦ (1 + ε)x: of N(0, v), with s = v + h²,
    −2v/s + v²/s²."""
    n, v = 1_000, 0.8
    points = np.sqrt(v) * st.norm.ppf((np.arange(n) + 0.5) / n)
    x = jnp.asarray(points, jnp.float32)[:, None]
    found = float(jnp.mean(x * score(mf.Blob(mf.SquaredExponential(H)), x)))
    v, s = float(np.var(points)), float(np.var(points)) + H**2
    assert found == pytest.approx(-2 * v / s + v**2 / s**2, rel=3e-3)


# ---- In a run. ----


@pytest.mark.standard_promotion
def test_the_lines_of_the_design_run_as_written():
    kernel, step_size = mf.SquaredExponential(0.5), 0.1
    start = mf.Gaussian(jnp.zeros(1), 1.0).sample(key(0), 20)
    flows = [
        mf.WassersteinFlow(step_size, integrator=mf.LeimkuhlerMatthews(), entropy=mf.Noise()),
        mf.WassersteinFlow(step_size, entropy=mf.KernelDensity(kernel)),
        mf.WassersteinFlow(step_size, entropy=mf.Blob(kernel)),
        mf.SteinFlow(kernel, step_size),
    ]
    for flow in flows:
        solution = mf.solve(NORMAL, flow, start, 5, key(1))
        assert isinstance(solution.measure, mf.Empirical)
        assert ("velocity" in solution.history) == (flow is not flows[0])
        assert np.all(np.isfinite(solution.measure.particles))


@pytest.mark.standard_promotion
def test_the_other_flows_of_the_design_run_as_written():
    step_size, start = 0.1, mf.Gaussian(jnp.zeros(1), 1.0).sample(key(0), 20)
    flows = [
        (mf.WassersteinFlow(step_size, preconditioner=mf.EnsemblePreconditioner(2)), mf.Empirical),
        (mf.KineticFlow(step_size, friction=1.0), mf.Empirical),
        (mf.BirthDeath(mf.WassersteinFlow(step_size), 0.1), mf.Empirical),
        (mf.BuresWassersteinFlow(step_size), mf.Gaussian),
        (mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(1e-2), samples=200), mf.Gaussian),
    ]
    for flow, kind in flows:
        state = flow.init(NORMAL, start)
        assert isinstance(flow.measure(state), kind)
        # Traced, and not compiled: what steps do is tested with each flow.
        after = jax.eval_shape(lambda state, flow=flow: flow.step(NORMAL, state, None, key(1)), state)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.standard_promotion
def test_optimisers_are_allowed_where_there_is_no_noise():
    flow = mf.WassersteinFlow(
        optimiser=optax.adam(optax.exponential_decay(0.1, 300, 0.1)),
        entropy=mf.KernelDensity(mf.SquaredExponential(H)),
    )
    start = mf.Gaussian(jnp.ones(1), 2.0).sample(key(0), 50)
    end = mf.solve(NORMAL, flow, start, 600, key(1)).measure.particles
    # With 50 particles it is 0.728, not yet 0.75.
    assert float(jnp.var(end)) == pytest.approx(0.728, abs=5e-3)


def flow(entropy, **options):
    return mf.WassersteinFlow(0.1, entropy=entropy, **options)


BAD = {
    "a kernel": (lambda: flow(KERNEL), TypeError, "entropy must say.*mf.KernelDensity"),
    "no kernel": (lambda: mf.KernelDensity(0.5), TypeError, "KernelDensity kernel must be a kernel, got 0.5"),
    "ridge": (lambda: mf.SteinGradientEstimator(KERNEL, 0.0), ValueError, "ridge must be > 0"),
    "share": (lambda: mf.SpectralSteinGradientEstimator(KERNEL, 1.5), ValueError, "share.*< 1"),
    "noise, too": (
        lambda: flow(mf.Blob(KERNEL), integrator=mf.EulerMaruyama()),
        ValueError,
        "either integrator or entropy.*twice.*entropy=mf.Noise",
    ),
    "metropolis": (
        lambda: flow(mf.Blob(KERNEL), metropolis=True),
        ValueError,
        "either metropolis or entropy",
    ),
    "some pairs": (
        lambda: flow(mf.Blob(KERNEL), interactions=mf.RandomBatches(2)),
        ValueError,
        "biased; use mf.ExactInteractions",
    ),
    "optimiser with noise": (
        lambda: mf.WassersteinFlow(optimiser=optax.adam(0.1)).init(NORMAL, jnp.ones((2, 1))),
        ValueError,
        "not Langevin.*mf.KernelDensity",
    ),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


# ---- What flows say of themselves. ----


def test_flows_describe_what_they_reach():
    """Below what the problem says: each by the temperature, and by what realises the entropy."""
    descent = mf.Problem(lambda theta: jnp.sum(theta**2))
    told = {
        "off by O(η)": mf.WassersteinFlow(0.1, integrator=mf.EulerMaruyama()),
        "off by O(η²), and not at all for quadratic V": mf.WassersteinFlow(0.1),
        "for any η. Particles do not interact": mf.WassersteinFlow(0.1, metropolis=True),
        "takes the place of noise": flow(mf.Blob(KERNEL)),
        "unless N is far above J": mf.SteinFlow(KERNEL, 0.1),
        "forget the start sooner": mf.KineticFlow(0.1, 1.0),
        "among Gaussians": mf.BuresWassersteinFlow(0.1),
        "what MeanFieldGaussian() can be": mf.ParametricFlow(mf.MeanFieldGaussian(), optax.sgd(0.1)),
        "Births and deaths": mf.BirthDeath(mf.WassersteinFlow(0.1), 0.1),
    }
    for words, one in told.items():
        text = one.describe(NORMAL)
        assert text.startswith(NORMAL.describe())
        assert f"Solved by {one}:" in text
        assert [other for other in told if other in text.replace(NORMAL.describe(), "")][-1] == words
    assert "No noise is drawn" in mf.WassersteinFlow(0.1).describe(descent)
    assert "no entropy" in mf.SteinFlow(KERNEL, 0.1).describe(descent)


def test_a_flow_of_ones_own_may_say_nothing():
    class Own(mf.AbstractFlow):
        def init(self, problem, initial):
            return initial

        def step(self, problem, state, batch, key):
            return state

        def measure(self, state):
            return mf.Empirical(state)

    assert "for its author to say" in Own().describe(NORMAL)
