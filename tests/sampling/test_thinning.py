"""Thinning: the published algorithms index by index, biased draws corrected, and errors that independent
draws do not have."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SMALL, draw, key, rows
from helpers import squared_distances as distances

import measureflow as mf

PRIOR = mf.Gaussian(jnp.zeros(2), 1.0)
PROBLEM = mf.Problem(lambda theta: jnp.zeros(()), 1.0 * mf.KL(PRIOR))


def whitened(x, score):
    """z = L⁻¹(x − m) of the sample covariance LLᵀ, and Lᵀs."""
    centred = x - x.mean(axis=0)
    factor = np.linalg.cholesky(centred.T @ centred / len(x))
    return np.linalg.solve(factor, centred.T).T, score @ factor


def half_median(z):
    return np.median(distances(z, z)[np.triu_indices(len(z), 1)]) / 2


def stein_matrix(z, s):
    """u(zᵢ, zⱼ) of κ = (1 + d/ℓ²)^(−½), as Riabiz et al. (2022) write it (equation 4): with c = 1/ℓ²,
    ∇₁·∇₂κ = cJ κ³ − 3c² d κ⁵, and ∇₁κ = −c(x − y)κ³."""
    c, d = 1 / half_median(z), distances(z, z)
    kappa, difference = (1 + c * d) ** -0.5, z[:, None] - z[None]
    trace = c * z.shape[1] * kappa**3 - 3 * c**2 * d * kappa**5
    first = c * kappa**3 * np.einsum("ijc,ic->ij", difference, s)
    second = -c * kappa**3 * np.einsum("ijc,jc->ij", difference, s)
    return trace + first + second + kappa * (s @ s.T)


def greedy(matrix, m, embedding=0.0):
    chosen = []
    for t in range(1, m + 1):
        total = 0.5 * np.diag(matrix) + matrix[:, chosen].sum(axis=1) - t * embedding
        chosen.append(int(np.argmin(total)))
    return chosen


def indices(thinned, particles):
    """Which rows they are."""
    return [int(np.argmin(np.sum((particles - row) ** 2, axis=1))) for row in thinned]


def test_indices_are_those_of_the_published_algorithms():
    x = np.random.default_rng(0).normal(size=(60, 2)) @ np.array([[2.0, 0.5], [0.0, 0.7]])
    z, s = whitened(x, -x)
    particles = jnp.asarray(x, jnp.float32)
    stein = mf.thin(particles, PROBLEM, 15)
    assert isinstance(stein, mf.Empirical)
    expected = greedy(stein_matrix(z, s), 15)
    assert indices(rows(stein.particles), x) == expected
    # Without the divergence's sign, or with the score reversed, others are chosen.
    assert greedy(stein_matrix(z, -s), 15) != expected
    kappa = (1 + distances(z, z) / half_median(z)) ** -0.5
    herded = mf.thin(mf.Empirical(particles), PROBLEM, 15, method="herding")
    assert indices(rows(herded.particles), x) == greedy(kappa, 15, kappa.mean(axis=1))
    # The first k of them are those of k, and draws are particles.
    draws = particles.reshape(12, 5, 2)
    np.testing.assert_array_equal(mf.thin(draws, PROBLEM, 6).particles, stein.particles[:6])


def test_stein_thinning_corrects_draws_of_another_law():
    """2,000 draws of N(0, 1.5²) for N(0, 1). Variances of m independent draws of N(0, 1), averaged over two
    coordinates, are 1 ± √(2/2m)."""
    draws = mf.Gaussian(jnp.zeros(2), 1.5).sample(key(1), 2_000)
    m = 100
    variances = {
        method: float(jnp.mean(jnp.var(mf.thin(draws, PROBLEM, m, method=method).particles, axis=0)))
        for method in ("stein", "herding")
    }
    error = np.sqrt(2 / (2 * m))
    assert abs(variances["stein"] - 1) < error, "closer than independent draws of q* itself"
    # The measure as it is keeps its variance of 2.25.
    assert abs(variances["herding"] - 2.25) < 2.25 * error


def test_herding_is_far_closer_than_independent_draws():
    """E MMD² of m independent draws of Q is (κ(0) − ∬κ dQdQ)/m."""
    measure = mf.Empirical(mf.Gaussian(jnp.zeros(1), 1.0).sample(key(2), 1_000))
    problem = mf.Problem(lambda theta: jnp.zeros(()), mf.KL(mf.Gaussian(jnp.zeros(1), 1.0)))
    x = rows(measure.particles) / np.std(rows(measure.particles))
    kernel, m = np.exp(-distances(x, x) / 2), 64
    chosen = mf.thin(measure, problem, m, method="herding", kernel=mf.SquaredExponential(1.0))
    picked = indices(rows(chosen.particles), rows(measure.particles))
    squared_mmd = (
        kernel[np.ix_(picked, picked)].mean() - 2 * kernel[picked].mean(axis=0).mean() + kernel.mean()
    )
    independent = (1 - kernel.mean()) / m
    assert 0 <= squared_mmd + 1e-9 < independent / 20


def test_pytrees_and_interactions():
    """The score is the problem's own: with an interaction, that of the particles."""
    particles = draw(SMALL, 12)
    prior = mf.Gaussian({name: jnp.zeros(shape) for name, shape in SMALL.items()}, 1.0)
    problem = mf.Problem(
        lambda theta: jnp.sum(theta["vector"] ** 2),
        0.5 * mf.SquaredMMD(prior, mf.SquaredExponential(1.0)) + 0.1 * mf.KL(prior),
    )
    thinned = mf.thin(particles, problem, 3)
    assert {name: leaf.shape for name, leaf in thinned.particles.items()} == {
        name: (3, *shape) for name, shape in SMALL.items()
    }
    with pytest.raises(ValueError, match=r"measure has weights.*herding"):
        mf.thin(mf.Empirical(particles, jnp.arange(1.0, 13.0)), problem, 3)


PARTICLES = jnp.arange(8.0).reshape(4, 2)
BAD = {
    "m 0": (lambda: mf.thin(PARTICLES, PROBLEM, 0), ValueError, "m must be at least 1"),
    "m": (lambda: mf.thin(PARTICLES, PROBLEM, 9), ValueError, "at most the number of points, 4, got 9"),
    "method": (lambda: mf.thin(PARTICLES, PROBLEM, 2, method="x"), ValueError, "method must be"),
    "kernel": (lambda: mf.thin(PARTICLES, PROBLEM, 2, kernel=1.0), TypeError, "kernel must be radial"),
    "a Gaussian": (lambda: mf.thin(PRIOR, PROBLEM, 2), TypeError, "measure must be particles"),
    "no temperature": (
        lambda: mf.thin(PARTICLES, mf.deep_ensemble(lambda theta: jnp.sum(theta**2)), 2),
        ValueError,
        'without temperature.*method="herding"',
    ),
    "not finite": (
        lambda: mf.thin(PARTICLES.at[1, 0].set(jnp.inf), PROBLEM, 2),
        ValueError,
        "not finite at 1 of 4",
    ),
}


@pytest.mark.usefixtures("as_a_user_runs_it")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
