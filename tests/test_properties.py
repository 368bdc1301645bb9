"""Properties of the library for all inputs, by Hypothesis. Each is shown to see a mistake: TABLE, at the end,
names for every check a wrong version of a library function, a mutant, under which it must fail."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from helpers import jit, rows
from hypothesis import strategies as st
from jaxtyping import install_import_hook
from strategies import (
    FEATURES,
    SMALL,
    VECTOR,
    WIDE,
    arrays,
    gaussian_pairs,
    gaussians,
    normals,
    particles,
    positive,
    powers_of_two,
    radial_kernels,
    regression_data,
    reordered,
    seeds,
    statements,
    sums,
    trees,
)

import measureflow as mf
from measureflow.core import pytrees
from measureflow.flows import wasserstein
from measureflow.networks import likelihoods
from measureflow.networks import losses as network_losses
from measureflow.numerics.interactions import EXACT, AbstractInteractions
from measureflow.prediction import metrics, predictive
from measureflow.runs import batches
from measureflow.spaces import embeddings, kernels
from measureflow.statement import divergences

with install_import_hook("measureflow", "beartype.beartype"):
    from measureflow.tables import table as tabular

# float32 rounds to 6e-8. A result is a few dozen operations on numbers of size 10 or less.
ROUNDING = 2e-5
# From inner products, ‖x − y‖² ≥ 1/16 is known up to the rounding of ‖x‖² + ‖y‖² ≤ 100: one digit in 10⁴.
FROM_INNER_PRODUCTS = 1e-3
# Standard errors: by chance alone, one number in two million is farther away.
ERRORS = 5.0


def drawn(examples=8, marks=(), **strategies):
    """What Hypothesis draws for a check, and how often."""

    def keep(check):
        check.strategies, check.examples, check.marks = strategies, examples, marks
        return check

    return keep


# NumPyro's code promotes integers and ranks.
drawn_for_numpyro = functools.partial(drawn, marks=(pytest.mark.standard_promotion,))


def tolerance(tree):
    return FROM_INNER_PRODUCTS if set(tree) == set(WIDE) else ROUNDING


def assert_near(value, expected, relative=ROUNDING):
    """Up to `relative` of 1 + the largest entry: sums of terms of size 1 may cancel."""
    value, expected = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (value, expected)
    )
    limit = relative * (1 + max(np.max(np.abs(leaf)) for leaf in expected))
    for mine, other in zip(value, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=limit, equal_nan=False)


def assert_equal(value, expected):
    """To the bit."""
    for mine, other in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(mine, other), (mine, other)


# ---- The statement and its gradient. ----

SMALL_STATEMENTS = statements(((SMALL, 5),))


@jit
def gradient(statement):
    return statement.problem().wasserstein_gradient(statement.particles)


@jit
def value(statement):
    return statement.repulsive().value(mf.Empirical(statement.particles))


@jit
def rates(statement):
    """How fast L(Q_N), without its entropy, changes where particles move in a direction: by the gradient, and
    by the derivative of the value."""

    def energy(points):
        log_densities = jax.vmap(statement.prior.log_density)(points)
        return statement.repulsive().value(mf.Empirical(points)) - statement.kl * jnp.mean(log_densities)

    found = statement.problem().wasserstein_gradient(statement.particles)
    products = jax.tree.leaves(jax.tree.map(jnp.vdot, found, statement.direction))
    rate = jax.jvp(energy, (statement.particles,), (statement.direction,))[1]
    return sum(products) / len(statement.order), rate


@drawn(statement=statements())
def check_gradient_is_the_derivative_of_the_value(statement):
    """d/dt L(particles + t·direction) = (1/N) Σᵢ ⟨∇V(θᵢ) + (1/N) Σⱼ ∇₁W(θᵢ, θⱼ), directionᵢ⟩. Of products of
    size 20 there are up to 36."""
    assert_near(*rates(statement), 10 * tolerance(statement.particles))


@drawn(statement=SMALL_STATEMENTS)
def check_gradient_follows_its_particles(statement):
    """Particles in another order have their gradients in that order."""
    assert_near(gradient(statement.permuted()), reordered(gradient(statement), statement.order))


@drawn(statement=statements())
def check_value_does_not_know_the_order(statement):
    """Q_N is a measure: L(Q_N) does not depend on which particle comes first."""
    assert_near(value(statement.permuted()), value(statement), tolerance(statement.particles))


@drawn(statement=SMALL_STATEMENTS)
def check_pytree_is_its_ravelled_vector(statement):
    """How θ is cut into leaves changes neither L nor its gradient."""
    flat = statement.ravelled()
    assert_near(value(flat), value(statement))
    assert_near(rows(gradient(flat)), rows(gradient(statement)))


@drawn(statement=SMALL_STATEMENTS, by=trees(SMALL))
def check_translation_changes_nothing(statement, by):
    """Particles, prior, atoms and loss moved together have the same gradient."""
    assert_near(gradient(statement.moved(by)), gradient(statement))


@jit
def of_terms(statement, a, b):
    """The gradients of ℓ + aD₁ + bD₂, ℓ + D₁, ℓ + D₂ and ℓ."""
    first, second = mf.SquaredMMD(statement.prior, statement.smooth), mf.KL(statement.prior)
    stated = [a * first + b * second, first, second, None]
    return [mf.Problem(statement.loss, r).wasserstein_gradient(statement.particles) for r in stated]


@drawn(statement=SMALL_STATEMENTS, a=positive, b=positive)
def check_regularisers_add(statement, a, b):
    """∇(ℓ + aD₁ + bD₂) = ∇ℓ + a∇D₁ + b∇D₂."""
    both, first, second, none = map(rows, of_terms(statement, a, b))
    assert_near(both, none + a * (first - none) + b * (second - none))


# ---- The flow. ----

STEP_SIZE = np.float32(1 / 16)


@jit
def path(statement, noise, step_size, seed, preconditioner=None):
    """The particles after four steps, of all of the problem or of its part without noise."""
    flow = mf.WassersteinFlow(step_size, preconditioner, integrator=mf.EulerMaruyama())
    stated = statement.problem() if noise else statement.repulsive()
    start = flow.init(stated, statement.particles)
    return mf.run(stated, flow, start, None, jax.random.key(seed), 4).particles


@drawn(statement=SMALL_STATEMENTS)
def check_flow_without_noise_follows_its_particles(statement):
    """τ = 0: particles in another order take the same paths in that order. Rounding adds up."""
    end = path(statement, False, STEP_SIZE, np.uint32(0))
    permuted = path(statement.permuted(), False, STEP_SIZE, np.uint32(0))
    assert_near(permuted, reordered(end, statement.order), 4 * ROUNDING)


@drawn(statement=SMALL_STATEMENTS, g=powers_of_two)
def check_preconditioner_is_a_step_size(statement, g):
    """τ = 0: a constant g is the step size ηg. Steps of up to ½ may stretch what was rounded."""
    preconditioned = path(statement, False, STEP_SIZE, np.uint32(0), mf.FixedPreconditioner(g))
    assert_near(preconditioned, path(statement, False, STEP_SIZE * g, np.uint32(0)), 10 * ROUNDING)


@drawn(statement=SMALL_STATEMENTS, c=powers_of_two, seed=seeds)
def check_units_of_the_loss_do_not_matter(statement, c, seed):
    """cL with steps η/c takes the path of L with steps η, noise and all. To the bit: c is a power of two."""
    scaled = path(statement.scaled(c), True, STEP_SIZE / c, seed)
    assert_equal(scaled, path(statement, True, STEP_SIZE, seed))


@jit
def langevin_step(statement, step_size, seed, n):
    """n particles that are all where the first is, after one step; and their drift."""
    stated = mf.deep_langevin_ensemble(statement.loss, statement.prior, kl=statement.kl)
    start = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], n, axis=0), statement.particles)
    flow = mf.WassersteinFlow(step_size, integrator=mf.EulerMaruyama())
    end = mf.run(stated, flow, flow.init(stated, start), None, jax.random.key(seed), 1)
    return start, end.particles, stated.wasserstein_gradient(start)


@drawn(statement=SMALL_STATEMENTS, eta=positive, seed=seeds)
def check_noise_is_standard_normal(statement, eta, seed):
    """(θ′ − θ + η·drift)/√(2ητ) is N(0, 1), and its entries are independent."""
    n = 2000
    start, end, drift = map(rows, langevin_step(statement, eta, seed, n))
    noise = (end - start + eta * drift) / math.sqrt(2 * eta * statement.kl)
    assert abs(noise.mean()) <= ERRORS / math.sqrt(noise.size)
    assert abs(noise.var() - 1) <= ERRORS * math.sqrt(2 / noise.size)
    assert abs(np.mean(noise**4) - 3) <= ERRORS * math.sqrt(96 / noise.size)
    assert abs(np.mean(noise[1:] * noise[:-1])) <= ERRORS / math.sqrt(noise.size)
    correlations = np.corrcoef(noise.T)[np.triu_indices(noise.shape[1], 1)]
    assert np.all(np.abs(correlations) <= ERRORS / math.sqrt(n))


def linear_loss(theta, batch):
    inputs, targets, weights = batch
    return jnp.mean(weights * jnp.square(inputs @ theta["vector"] - targets))


@drawn(
    examples=5,
    data=regression_data(5),
    points=particles(VECTOR, 3),
    first=st.integers(1, 4),
    second=st.integers(1, 4),
    seed=seeds,
)
def check_steps_add(data, points, first, second, seed):
    """k steps and then m more are k + m steps, to the bit: batches, noise, momentum and all."""
    prior = mf.Gaussian({"vector": jnp.zeros(FEATURES)}, 1.0)
    stated = mf.deep_langevin_ensemble(linear_loss, prior, kl=0.1)
    flow = mf.WassersteinFlow(1 / 32, mf.RMSPreconditioner(adapt_steps=4), momentum=0.5)
    solve = functools.partial(mf.solve, stated, flow, key=jax.random.key(seed), data=data, batch_size=2)
    whole, part = solve(points, first + second), solve(points, first)
    assert_equal(solve(part.state, second).state, whole.state)


def minus_rows_shown(theta, batch):
    """Rows are those of the unit matrix: with step size 1, θ counts how often each was shown."""
    return -jnp.sum(batch @ theta)


@jit
def epoch(state, cases, batch_size, seed):
    stated, flow, steps = mf.deep_ensemble(minus_rows_shown), mf.WassersteinFlow(1.0), cases // batch_size
    return mf.run(stated, flow, state, jnp.eye(cases), jax.random.key(seed), steps, batch_size=batch_size)


@drawn(size=st.sampled_from([(6, 2), (7, 3)]), epochs=st.integers(1, 3), seed=seeds)
def check_every_epoch_shows_every_row_once(size, epochs, seed):
    """No row twice in an epoch; none missing, but for the remainder that makes no batch."""
    cases, batch_size = size
    state = mf.ParticleState(jnp.zeros((1, cases)), jnp.zeros((), jnp.int32))
    for _ in range(epochs):
        after = epoch(state, cases, batch_size, seed)
        shown = np.asarray(after.particles - state.particles)
        assert set(shown.ravel()) <= {0, 1}
        assert shown.sum() == cases // batch_size * batch_size
        state = after


# ---- Kernels, embeddings, divergences, measures. ----

POINTS = particles(SMALL, 5)


def table(kernel, x, y):
    """κ(xᵢ, yⱼ), by calling κ."""
    return jax.vmap(lambda a: jax.vmap(lambda b: kernel(a, b))(y))(x)


gram = jit(table)


@drawn(examples=15, kernel=radial_kernels, x=POINTS)
def check_kernels_are_positive_definite(kernel, x):
    """κ is symmetric, κ(x, x) is its largest value, and no Gram matrix has an eigenvalue below zero."""
    matrix = np.asarray(gram(kernel, x, x), np.float64)
    assert_equal(matrix, matrix.T)
    assert np.all(matrix <= np.diagonal(matrix)[:, None])
    assert np.linalg.eigvalsh(matrix)[0] >= -ROUNDING * np.trace(matrix)


@jit
def slopes(lengthscale, s):
    found = [mf.SquaredExponential(lengthscale), mf.InverseMultiquadric(lengthscale)]
    found += [mf.Matern(nu, lengthscale) for nu in (0.5, 1.5, 2.5)]
    found += [found[0] + 2.0 * found[2]]
    return [(kernel.slope(s), jax.vmap(jax.grad(kernel.profile))(s)) for kernel in found]


@drawn(lengthscale=positive, s=arrays((6,), low=1 / 16, high=4.0, step=1 / 16))
def check_slope_is_the_derivative_of_the_profile(lengthscale, s):
    """φ′(s), for s > 0: a Matérn kernel may have a cusp at 0."""
    for slope, expected in slopes(lengthscale, s):
        assert_near(slope, expected)


def features(theta):
    """Of the shape of θ, and nonlinear."""
    return jax.tree.map(lambda leaf: jnp.sin(leaf) + 0.5 * jnp.square(leaf), theta)


@jit
def pulled_back(terms, x):
    """The library's gradient of ½∬κ_f dQ_N dQ_N, and autodiff's."""
    kernel = terms.kernel()

    def energy(x):
        points = jax.vmap(features)(x)
        return 0.5 * jnp.sum(jnp.mean(table(kernel, points, points), axis=1))

    return mf.FreeEnergy(interaction=kernel.on(features)).wasserstein_gradient(x), jax.grad(energy)(x)


@drawn(terms=sums, x=POINTS)
def check_pull_back_obeys_the_chain_rule(terms, x):
    """∇₁κ(f(θ), f(θ′)) = Df(θ)ᵀ(∇₁κ)(f(θ), f(θ′)), summed over particles."""
    assert_near(*pulled_back(terms, x))


@jit
def squared_mmd(kernel, p, q):
    stated = mf.Problem(lambda theta: jnp.zeros(()), 1.0 * mf.SquaredMMD(p, kernel))
    return stated.value_parts(q, key=jax.random.key(0), samples=2)["MMD²"]


@drawn(terms=sums, x=POINTS, y=POINTS, p=gaussians(SMALL, "pytree"), q=gaussians(SMALL, "pytree"))
def check_squared_mmd_is_a_squared_distance(terms, x, y, p, q):
    """MMD² ≥ 0, it is symmetric, and 0 from a measure to itself. Terms that cancel are 4 at most."""
    smooth = mf.SquaredExponential(terms.lengthscales[0])
    for kernel, one, other in ((terms.kernel(), mf.Empirical(x), mf.Empirical(y)), (smooth, p, q)):
        there, back = squared_mmd(kernel, one, other), squared_mmd(kernel, other, one)
        assert there >= -ROUNDING
        assert_near(there, back)
        assert_near(squared_mmd(kernel, one, one), 0.0)


@jit
def kl(q, p):
    stated = mf.Problem(lambda theta: jnp.zeros(()), 1.0 * mf.KL(p))
    return stated.value_parts(q, key=jax.random.key(0), samples=2)["KL"]


def row(theta):
    """θ ravelled, in float64."""
    return rows(jax.tree.map(lambda leaf: np.asarray(leaf)[None], theta))[0]


def moments(gaussian):
    """Mean and covariance over the ravelled θ, in float64."""
    if gaussian.full_rank:
        factor = np.asarray(gaussian.scale, np.float64)
    else:
        whole = jax.tree.map(lambda m, s: np.broadcast_to(s, m.shape), gaussian.mean, gaussian.scale)
        factor = np.diag(row(whole))
    return row(gaussian.mean), factor @ factor.T


@drawn(pair=gaussian_pairs(SMALL))
def check_kl_of_gaussians_is_its_closed_form(pair):
    """KL(Q, P) = ½(tr Σ_P⁻¹Σ_Q + (m_Q − m_P)ᵀΣ_P⁻¹(m_Q − m_P) − J + log |Σ_P|/|Σ_Q|) ≥ 0, KL(Q, Q) = 0."""
    p, q = pair
    (m, a), (n, b) = moments(p), moments(q)
    logarithms = np.linalg.slogdet(a)[1] - np.linalg.slogdet(b)[1]
    expected = np.trace(np.linalg.solve(a, b)) + (n - m) @ np.linalg.solve(a, n - m) - len(m) + logarithms
    assert kl(q, p) >= -ROUNDING
    assert_near(kl(q, p), expected / 2)
    assert_near(kl(q, q), 0.0)


@jit
def embedded(terms, atoms, x):
    embedding = mf.kernel_mean_embedding(terms.kernel(), mf.Empirical(atoms))
    return jax.vmap(embedding)(x), table(terms.kernel(), x, atoms)


@drawn(terms=sums, atoms=POINTS, x=POINTS)
def check_embedding_of_atoms_is_a_mean(terms, atoms, x):
    """μ_P(θ) = (1/M) Σⱼ κ(θ, θⱼ)."""
    embedding, values = embedded(terms, atoms, x)
    assert_near(embedding, np.mean(values, axis=1))


@jit
def whitened_embedding(lengthscale, prior, measure, theta):
    kernel = mf.SquaredExponential(lengthscale).on(mf.Whiten(prior))
    return mf.kernel_mean_embedding(kernel, measure)(theta)


@drawn(lengthscale=positive, pair=gaussian_pairs(SMALL), theta=trees(SMALL))
def check_embedding_in_whitened_coordinates(lengthscale, pair, theta):
    """∫ exp(−‖S⁻¹(θ − θ′)‖²/2σ²) dN(m, Σ)(θ′) = |A/σ²|^-½ exp(−½ zᵀA⁻¹z), with A = S⁻¹ΣS⁻ᵀ + σ²I and
    z = S⁻¹(θ − m). The exponent, −100 at least, is known up to rounding."""
    (_, of_prior), (mean, covariance) = map(moments, pair)
    inverse, variance = np.linalg.inv(np.linalg.cholesky(of_prior)), float(lengthscale) ** 2
    matrix, z = inverse @ covariance @ inverse.T + variance * np.eye(len(mean)), inverse @ (row(theta) - mean)
    exponent = -0.5 * z @ np.linalg.solve(matrix, z) - 0.5 * np.linalg.slogdet(matrix / variance)[1]
    value = whitened_embedding(lengthscale, *pair, theta)
    np.testing.assert_allclose(value, np.exp(exponent), rtol=100 * ROUNDING)


median = jit(lambda x: mf.median_heuristic(x))


@drawn(
    x=st.sampled_from([SMALL, WIDE]).flatmap(lambda shapes: particles(shapes, 5)),
    by=arrays(()),
    c=powers_of_two,
)
def check_median_heuristic(x, by, c):
    """σ² = ½ median over pairs i < j of ‖θᵢ − θⱼ‖²: it scales with c, and does not see a translation."""
    points, relative = rows(x), tolerance(x)
    pairs = [np.sum((a - b) ** 2) for i, a in enumerate(points) for b in points[:i]]
    expected = math.sqrt(np.median(pairs) / 2)
    assert_near(median(x), expected, relative)
    assert_near(median(jax.tree.map(lambda leaf: leaf + by, x)), expected, relative)
    assert_near(median(jax.tree.map(lambda leaf: c * leaf, x)) / c, expected, relative)


@jit
def in_standard_coordinates(gaussian, z):
    theta = gaussian.from_standard(z)
    return gaussian.to_standard(theta), theta, gaussian.log_density(theta)


@drawn(gaussian=gaussians(SMALL), z=trees(SMALL))
def check_gaussians_are_those_of_scipy(gaussian, z):
    """scale⁻¹((m + scale·z) − m) = z, and the density is SciPy's."""
    again, theta, log_density = in_standard_coordinates(gaussian, z)
    assert_near(again, z)
    assert_near(log_density, scipy.stats.multivariate_normal(*moments(gaussian)).logpdf(row(theta)))


@jit
def members(gaussian):
    families = (mf.MeanFieldGaussian(), mf.FullRankGaussian())
    return [family.member(family.parameters(gaussian)) for family in families]


@drawn(gaussian=gaussians(SMALL))
def check_families_keep_their_gaussians(gaussian):
    """Q_ν with ν of a Gaussian is that Gaussian; the mean field keeps its mean and its variances."""
    mean_field, full_rank = members(gaussian)
    mean, covariance = moments(gaussian)
    assert_near(moments(full_rank), (mean, covariance))
    assert_near(moments(mean_field), (mean, np.diag(np.diagonal(covariance))))


# ---- From networks to predictions. ----

NETWORK = mf.Network.mlp(FEATURES, (4,), 2, "tanh")
NORMALS = {"components": normals(), "y": arrays((3,)), "q": arrays((3,), 1 / 16, 15 / 16, step=1 / 16)}


@drawn(
    examples=6,
    features=st.integers(1, 9),
    hidden=st.lists(st.integers(1, 9), max_size=2),
    outputs=st.integers(1, 3),
)
def check_prior_has_the_fan_in(features, hidden, outputs):
    """A weight's variance times the number of its inputs is 2, as in He et al. (2015); a bias's is 1."""
    scales = mf.Network.mlp(features, tuple(hidden), outputs).prior().scale
    for layer, fan_in in zip(scales, (features, *hidden), strict=True):
        assert_near(layer["weight"] ** 2 * fan_in, 2.0)
        assert_near(layer["bias"], 1.0)


@jit
def losses(theta, data, repeated):
    """Of all rows with their weights, of the two halves, and of rows repeated as their weights say."""
    loss, half = mf.NegativeLogLikelihood(NETWORK, likelihoods.Heteroscedastic()), len(data[1]) // 2
    first, second = (tuple(leaf[part] for leaf in data) for part in (slice(half), slice(half, None)))
    return loss(theta, data), loss(theta, first), loss(theta, second), loss(theta, repeated)


@drawn_for_numpyro(data=regression_data(6), seed=seeds)
def check_weights_are_repeated_rows(data, seed):
    """ℓ = (1/n) Σ −w log p is the mean of its halves' ℓ, and Σw/n times ℓ of rows repeated w times."""
    inputs, targets, weights = data
    chosen = np.repeat(np.arange(len(weights)), weights.astype(int))
    theta = NETWORK.init(jax.random.key(seed))
    whole, first, second, repeated = losses(theta, data, (inputs[chosen], targets[chosen]))
    assert_near((first + second) / 2, whole)
    assert_near(weights.mean() * repeated, whole)


@jit
def summary(loc, scale, y, q):
    mixture = mf.Mixture(dist.Normal(loc, scale))
    return {
        "mean": mixture.mean,
        "variance": mixture.variance,
        "parts": mixture.aleatoric_variance + mixture.epistemic_variance,
        "log_prob": mixture.log_prob(y),
        "quantile": mixture.icdf(q),
        "cdf at quantile": mixture.cdf(mixture.icdf(q)),
    }


@drawn_for_numpyro(**NORMALS, order=st.permutations(range(4)))
def check_mixture_does_not_know_the_order(components, y, q, order):
    """Particles in another order predict the same."""
    permuted = [part[:, np.array(order)] for part in components]
    assert_near(summary(*permuted, y, q), summary(*components, y, q))


@drawn_for_numpyro(**NORMALS)
def check_variance_has_two_parts(components, y, q):
    """E[Y] = (1/N) Σ mᵢ, and aleatoric + epistemic variance = E[Y²] − E[Y]²."""
    loc, scale = (part.astype(np.float64) for part in components)
    found = summary(*components, y, q)
    expected = np.mean(loc**2 + scale**2, axis=1) - loc.mean(axis=1) ** 2
    assert_near(
        [found[name] for name in ("mean", "variance", "parts")], [loc.mean(axis=1), expected, expected]
    )


@drawn_for_numpyro(**NORMALS)
def check_quantile_inverts_cdf(components, y, q):
    """F(F⁻¹(q)) = q. Densities are 2 at most, so that F rounds as y ≤ 10 does."""
    assert_near(summary(*components, y, q)["cdf at quantile"], q)


@jit
def in_units(loc, scale, location, unit, y):
    """log p of location + unit·y in these units, and of y: for Normal, Student's t, and several targets."""
    laws = [dist.Normal(loc, scale), dist.StudentT(5.0, loc, scale), dist.Normal(loc, scale).to_event(1)]
    changed = [likelihoods.rescaled(law, location, unit).log_prob(location + unit * y) for law in laws]
    return changed, [law.log_prob(y) for law in laws]


@drawn_for_numpyro(components=normals(), location=arrays(()), unit=positive, y=arrays((3, 1)))
def check_units_change_densities_by_their_scale(components, location, unit, y):
    """log p_{a + bY}(a + by) = log p_Y(y) − log b, for every target."""
    changed, plain = in_units(*components, location, unit, y)
    targets = (1, 1, components[0].shape[1])
    assert_near(changed, [value - k * np.log(unit) for value, k in zip(plain, targets, strict=True)])


@jit
def widened(loc, scale, factor):
    mixture = mf.Mixture(dist.Normal(loc, scale))
    wide = mixture.widened(factor)
    levels = jnp.array([0.5 - np.pi / 100, 0.5 + np.pi / 100])
    before, after = (jnp.mean(law.quantile(levels), axis=0) for law in (mixture, wide))
    mean = before + factor * (mixture.mean - before)
    return (after, wide.mean, wide.variance), (before, mean, factor**2 * mixture.variance)


@drawn_for_numpyro(components=normals(), factor=positive)
def check_widening_keeps_the_middle(components, factor):
    """m + c(Y − m) has middle m, c times the distance of the mean from it, and c² times the variance."""
    assert_near(*widened(*components, factor))


@jit
def uncertainty(logits):
    mixture = mf.Mixture(dist.CategoricalLogits(logits))
    return mixture.probs, mixture.entropy(), mixture.expected_entropy(), mixture.mutual_information()


@drawn_for_numpyro(logits=arrays((3, 4, 5)))
def check_entropy_has_two_parts(logits):
    """H[Y] = E H[Y | θ] + I, in nats, with 0 ≤ I ≤ log N."""
    each = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    mixed, expected = each.mean(axis=1), scipy.stats.entropy(each, axis=-1).mean(axis=1)
    entropy = scipy.stats.entropy(mixed, axis=-1)
    found = uncertainty(logits)
    assert_near(found, (mixed, entropy, expected, entropy - expected))
    assert np.all((found[-1] >= 0) & (found[-1] <= math.log(logits.shape[1])))


def mean_and_variance(mixture):
    return mixture.mean, mixture.variance


@drawn_for_numpyro(
    seed=seeds,
    inputs=arrays((7, FEATURES)),
    chosen=st.lists(st.integers(0, 279), min_size=1, max_size=9),
)
def check_predictions_do_not_know_other_rows(seed, inputs, chosen):
    """To the bit: what is predicted for a row does not depend on which others are asked for, or how many."""
    predict = mf.Predictive(NETWORK, likelihoods.Heteroscedastic(), NETWORK.sample(jax.random.key(seed), 3))
    many = np.tile(inputs, (40, 1))  # more than a block
    whole = predict.map(mean_and_variance, many)
    assert_equal(predict.map(mean_and_variance, many[chosen]), [leaf[chosen] for leaf in whole])


@drawn_for_numpyro(components=normals(), y=arrays((3,)))
def check_crps_is_its_integral(components, y):
    """∫ (F(x) − 1{x ≥ y})² dx. On a grid, it is known up to a step: that is where the jump is."""
    loc, scale = (part.astype(np.float64)[..., None] for part in components)
    x, step = np.linspace(-14, 14, 7001, retstep=True)
    below = scipy.stats.norm(loc, scale).cdf(x).mean(axis=1)
    expected = np.sum((below - (x >= y[:, None])) ** 2, axis=1) * step
    value = metrics.crps(mf.Mixture(dist.Normal(*map(jnp.asarray, components))), y)
    np.testing.assert_allclose(value, expected.mean(), rtol=0, atol=step)


@drawn(inside=arrays((4,), step=1.0), outside=arrays((5,), step=1.0))
def check_auroc_counts_pairs(inside, outside):
    """P(outside > inside) + ½ P(equal); with the two exchanged, one minus that."""
    pairs = outside[:, None] - inside[None, :]
    expected = np.mean(pairs > 0) + 0.5 * np.mean(pairs == 0)
    assert_near(metrics.auroc(inside, outside), expected)
    assert_near(metrics.auroc(outside, inside), 1 - expected)


@drawn(tables=st.tuples(regression_data(4), regression_data(7)))
def check_padding_leaves_weighted_means(tables):
    """Of tables of different lengths, side by side, Σ wy stays; parts of a table share its cases."""
    made = [tabular.Table.of(*parts) for parts in tables]
    _, targets, weights = tabular.stacked(made, 8)
    for one, its_targets, its_weights in zip(made, targets, weights, strict=True):
        assert_near(np.sum(its_weights * its_targets), np.sum(one.weights * one.targets))
        parts = [one.rows(part) for part in np.array_split(np.arange(len(one.weights)), 2)]
        assert_near(sum(part.cases for part in parts), one.cases)
        sums = [part.cases * np.mean(part.weights * part.targets) for part in parts]
        assert_near(sum(sums), one.cases * np.mean(one.weights * one.targets))


# ---- Mutants: a function of the library ↦ a wrong one. ----


def times(factor):
    """All numbers of its result times a factor."""
    return lambda real: lambda *a: jax.tree.map(lambda leaf: factor * leaf, real(*a))


def temperature(change):
    """The noise of another temperature."""
    return lambda real: lambda x, drift, eta, tau, *rest: real(x, drift, eta, change(tau), *rest)


def rolled(real):
    return lambda *a: jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), real(*a))


def first_particle_twice(real):
    return lambda self: real(self).at[0].multiply(2)


def without_last_leaf(real):
    return lambda x: real(dict(list(x.items())[:-1]) if isinstance(x, dict) else x)


def without_mean(real):
    def wrong(self, theta):
        zero = jax.tree.map(jnp.zeros_like, self.bump.mean)
        return real(eqx.tree_at(lambda embedding: embedding.bump.mean, self, zero), theta)

    return wrong


def drift_times_index(real):
    def wrong(x, drift, *rest):
        def on_leaf(leaf):
            return leaf * jnp.arange(len(leaf), dtype=leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))

        return real(x, jax.tree.map(on_leaf, drift), *rest)

    return wrong


def at_step_zero(real):
    def wrong(*arguments):
        return eqx.tree_at(lambda state: state.step, real(*arguments), jnp.zeros((), jnp.int32))

    return wrong


def with_replacement(real):
    def wrong(positions, n, key):
        return jax.random.randint(jax.random.fold_in(key, positions[0]), positions.shape, 0, n)

    return wrong


def without_jacobian(real):
    def wrong(self, kernel, x, *how):
        if isinstance(kernel, kernels.PullBack):
            return EXACT.gradient(kernel.kernel, jax.vmap(kernel.features)(x), *how)
        return real(self, kernel, x, *how)

    return wrong


def over_one_atom_less(real):
    def wrong(self, theta):
        atoms = pytrees.particle_count(self.reference.particles)
        return real(self, theta) * atoms / (atoms - 1)

    return wrong


def over_one_particle_less(real):
    return property(lambda self: real.fget(self) * self.mixture_size / (self.mixture_size - 1))


def over_sum_of_weights(real):
    return lambda losses, w: real(losses, w) if w is None else jnp.sum(w * losses) / jnp.sum(w)


def weighted_by_index(real):
    return lambda self, values: real(self, values * jnp.arange(self.mixture_size))


def centred_by_block(real):
    return lambda network, points, x: real(network, points, x - jnp.mean(x, axis=0, keepdims=True))


def padded_with_ones(real):
    def wrong(tables, rows):
        inputs, targets, weights = real(tables, rows)
        return inputs, targets, jnp.where(weights == 0, 1.0, weights)

    return wrong


class Mutant(NamedTuple):
    """`owner.attribute`, of the library, replaced by wrong(it)."""

    name: str
    owner: Any
    attribute: str
    wrong: Callable


#: Property: the mutants that it kills.
TABLE = {
    check_gradient_is_the_derivative_of_the_value: [
        Mutant("factor 2: interactions count twice", mf.FreeEnergy, "interaction_gradient", times(2)),
        Mutant("factor ½: KL pulls half", divergences, "negative_log_density", times(0.5)),
    ],
    check_gradient_follows_its_particles: [
        Mutant("wrong axis: gradients rolled by one", mf.FreeEnergy, "wasserstein_gradient", rolled),
    ],
    check_value_does_not_know_the_order: [
        Mutant("1/N: the first particle counts twice", mf.Empirical, "masses", first_particle_twice),
    ],
    check_pytree_is_its_ravelled_vector: [
        Mutant("distances without the last leaf", pytrees, "as_matrix", without_last_leaf),
    ],
    check_translation_changes_nothing: [
        Mutant("P without its mean", embeddings.SquaredExponentialOfGaussian, "__call__", without_mean),
    ],
    check_regularisers_add: [
        Mutant("weight squared", mf.FreeEnergy, "__rmul__", lambda real: lambda self, w: real(self, w**2)),
        Mutant(
            "a term dropped from the sum",
            mf.FreeEnergy,
            "__add__",
            lambda real: lambda self, other: real(self, other) if self.interaction is None else self,
        ),
    ],
    check_flow_without_noise_follows_its_particles: [
        Mutant("a drift that depends on the index", wasserstein, "euler_maruyama", drift_times_index),
    ],
    check_preconditioner_is_a_step_size: [
        Mutant(
            "g squared",
            mf.FixedPreconditioner,
            "diagonal",
            lambda real: lambda self, *a: jax.tree.map(jnp.square, real(self, *a)),
        ),
    ],
    check_units_of_the_loss_do_not_matter: [
        Mutant("τ for √τ in the noise", wasserstein, "euler_maruyama", temperature(jnp.square)),
    ],
    check_noise_is_standard_normal: [
        Mutant("√2 dropped from the noise", wasserstein, "euler_maruyama", temperature(lambda tau: tau / 2)),
    ],
    check_steps_add: [
        Mutant("resuming forgets the step", mf.WassersteinFlow, "resume", at_step_zero),
    ],
    check_every_epoch_shows_every_row_once: [
        Mutant("rows drawn with replacement", batches, "permuted", with_replacement),
    ],
    check_kernels_are_positive_definite: [
        Mutant("sign: ‖x + y‖ for ‖x − y‖", kernels, "subtract", lambda real: pytrees.add),
    ],
    check_slope_is_the_derivative_of_the_profile: [
        Mutant("factor ½ in Matérn's slope", mf.Matern, "slope", times(0.5)),
    ],
    check_pull_back_obeys_the_chain_rule: [
        Mutant("the Jacobian dropped", AbstractInteractions, "gradient", without_jacobian),
    ],
    check_squared_mmd_is_a_squared_distance: [
        Mutant(
            "sign of the cross term",
            divergences,
            "mean_kernel",
            lambda real: lambda kernel, p, q: real(kernel, p, q) if p is q else -real(kernel, p, q),
        ),
    ],
    check_kl_of_gaussians_is_its_closed_form: [
        Mutant(
            "sign of the entropy",
            divergences,
            "kl_of_gaussians",
            lambda real: lambda q, p: real(q, p) + 2 * q.log_determinant(),
        ),
    ],
    check_embedding_of_atoms_is_a_mean: [
        Mutant("1/(M − 1)", embeddings.EmpiricalEmbedding, "__call__", over_one_atom_less),
    ],
    check_embedding_in_whitened_coordinates: [
        Mutant(
            "the push-forward without its scale",
            embeddings,
            "push_forward",
            lambda real: lambda features, measure: mf.Gaussian(real(features, measure).mean, 1.0),
        ),
    ],
    check_median_heuristic: [
        Mutant("not divided by 2", mf, "median_heuristic", times(2**0.5)),
    ],
    check_gaussians_are_those_of_scipy: [
        Mutant("sign of the log-determinant", mf.Gaussian, "log_determinant", times(-1)),
    ],
    check_families_keep_their_gaussians: [
        Mutant(
            "log variances taken for log deviations",
            mf.MeanFieldGaussian,
            "parameters",
            lambda real: lambda self, q: (q.mean, times(2)(real)(self, q)[1]),
        ),
        Mutant(
            "a diagonal that is not exponentiated",
            mf.FullRankGaussian,
            "member",
            lambda real: lambda self, nu: mf.Gaussian(nu[0], jnp.tril(nu[1])),
        ),
    ],
    check_prior_has_the_fan_in: [
        Mutant(
            "fan-out for fan-in",
            mf.Network,
            "prior",
            lambda real: lambda self: real(mf.Network(self.init, self.apply, output_axis=0)),
        ),
    ],
    check_weights_are_repeated_rows: [
        Mutant("divided by the sum of weights", network_losses, "weighted_mean", over_sum_of_weights),
        Mutant(
            "weights dropped",
            likelihoods,
            "_weighted_mean",
            lambda real: lambda losses, w: real(losses, None),
        ),
    ],
    check_mixture_does_not_know_the_order: [
        Mutant("unequal weights of particles", mf.Mixture, "_over_particles", weighted_by_index),
    ],
    check_variance_has_two_parts: [
        Mutant("1/(N − 1)", mf.Mixture, "epistemic_variance", over_one_particle_less),
    ],
    check_quantile_inverts_cdf: [
        Mutant("from above", predictive, "_quantile", lambda real: lambda mixture, q: real(mixture, 1 - q)),
    ],
    check_units_change_densities_by_their_scale: [
        Mutant("the unit dropped", likelihoods, "rescaled", lambda real: lambda law, a, b: real(law, a, 1.0)),
    ],
    check_widening_keeps_the_middle: [
        Mutant(
            "about zero",
            mf.Mixture,
            "widened",
            lambda real: (
                lambda self, c: mf.Mixture(likelihoods.rescaled(self.component_distribution, 0.0, c))
            ),
        ),
    ],
    check_entropy_has_two_parts: [
        Mutant("in bits", mf.Mixture, "entropy", times(1 / math.log(2))),
    ],
    check_predictions_do_not_know_other_rows: [
        Mutant("statistics of a block leak", predictive, "_outputs", centred_by_block),
    ],
    check_crps_is_its_integral: [
        Mutant("factor ½ in E|X|", metrics, "_expected_absolute", times(0.5)),
    ],
    check_auroc_counts_pairs: [
        Mutant(
            "ties lost", metrics, "auroc", lambda real: lambda a, b: float(np.mean(b[:, None] > a[None, :]))
        ),
    ],
    check_padding_leaves_weighted_means: [
        Mutant("padding of weight 1", tabular, "stacked", padded_with_ones),
    ],
}


def search(check, **options):
    """Hypothesis looks for an example that fails. It always looks at the same ones."""
    settings = hypothesis.settings(
        max_examples=check.examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    settings(hypothesis.given(**check.strategies)(check))()


def named(check):
    return check.__name__.removeprefix("check_").replace("_", " ")


@pytest.mark.parametrize("check", [pytest.param(c, id=named(c), marks=c.marks) for c in TABLE])
def test_property(check):
    search(check)


@pytest.fixture
def fresh_programs():
    """Programs made of other functions are forgotten, before and after."""
    for clear in (eqx.clear_caches, jax.clear_caches):
        clear()
    yield
    for clear in (eqx.clear_caches, jax.clear_caches):
        clear()


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        pytest.param(check, mutant, id=f"{named(check)} - {mutant.name}", marks=check.marks)
        for check, mutants in TABLE.items()
        for mutant in mutants
    ],
)
def test_property_kills(check, mutant, monkeypatch):
    real = getattr(mutant.owner, mutant.attribute)
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong(real))
    with pytest.raises(AssertionError):
        # Any example will do: it need not be the simplest.
        search(check, phases=[hypothesis.Phase.generate], report_multiple_bugs=False)


def test_every_property_has_a_mutant():
    checks = {function for name, function in globals().items() if name.startswith("check_")}
    assert checks == {check for check, mutants in TABLE.items() if mutants}
