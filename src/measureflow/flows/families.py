"""Families for `ParametricFlow` beyond the diagonal and the full-rank Gaussian: few directions of
correlation, and several modes."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from measureflow.core.pytrees import Parameters, Particles, particle_count, particle_dimension
from measureflow.core.validation import require_count
from measureflow.flows.parametric import AbstractFamily, FullRankGaussian
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import Gaussian
from measureflow.spaces.mixtures import GaussianMixture

# Of the variance of every coordinate, what is given to directions that a beginning does not have.
_FIRST_SHARE = 0.1


class LowRankGaussian(AbstractFamily):
    """N(m, D² + UUᵀ): D diagonal, U with `rank` columns, ν = (m, log D, U). Between `MeanFieldGaussian`, rank
    0, and `FullRankGaussian`: J(2 + rank) numbers. A step costs a Cholesky factor, J³: for up to a thousand
    dimensions or so.

    Parameters
    ----------
    rank
        The number of directions.
    """

    rank: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        require_count("LowRankGaussian rank", self.rank, 1, "with none, it is MeanFieldGaussian().")

    def parameters(self, initial: Gaussian) -> tuple[Parameters, Parameters, Float[Array, "J rank"]]:
        """Directions are the largest correlations of the initial Gaussian, or cosines where it has none: at
        U = 0 the gradient in U is 0. The variances are kept."""
        flat, unravel = ravel_pytree(initial.mean)
        deviations = ravel_pytree(initial.deviations())[0]
        if self.rank > flat.size:
            raise ValueError(
                f"LowRankGaussian rank must be at most the number of dimensions, {flat.size}, got "
                f"{self.rank}; use FullRankGaussian()."
            )
        if initial.full_rank:
            correlations = initial.covariance() / deviations[:, None] / deviations[None, :]
            values, vectors = jnp.linalg.eigh(correlations)
            strengths = jnp.clip(values[::-1][: self.rank] - 1, _FIRST_SHARE, None)
            directions = vectors[:, ::-1][:, : self.rank] * jnp.sqrt(strengths)[None, :]
        else:
            angles = np.pi * (np.arange(flat.size) + 0.5)[:, None] * np.arange(self.rank) / flat.size
            directions = jnp.asarray(np.cos(angles) * np.sqrt(_FIRST_SHARE / self.rank), flat.dtype)
        shares = jnp.sum(jnp.square(directions), axis=1)
        # No coordinate is without a variance of its own.
        shrink = jnp.minimum(1.0, (1 - _FIRST_SHARE) / shares)
        directions = directions * jnp.sqrt(shrink)[:, None]
        rest = deviations * jnp.sqrt(1 - jnp.sum(jnp.square(directions), axis=1))
        return initial.mean, unravel(jnp.log(rest)), deviations[:, None] * directions

    def member(self, parameters: tuple[Parameters, Parameters, Float[Array, "J rank"]]) -> Gaussian:
        mean, log_scale, directions = parameters
        variances = jnp.exp(2 * ravel_pytree(log_scale)[0])
        exact = jax.lax.Precision.HIGHEST
        covariance = jnp.matmul(directions, directions.T, precision=exact) + jnp.diag(variances)
        return Gaussian(mean, jnp.linalg.cholesky(covariance))

    def moment_matched(self, particles: Empirical) -> Gaussian:
        if particle_count(particles.particles) > particle_dimension(particles.particles):
            return FullRankGaussian().moment_matched(particles)
        return particles.moment_matched()


class MixtureOfGaussians(AbstractFamily):
    """Σₖ wₖ N(mₖ, diag(sₖ)²): several modes, ν = (mₖ, log sₖ, log wₖ). What is descended is the free energy
    by as many draws from every component, with E log q for the entropy: unbiased for a loss and KL, and the
    weights have gradients, too. It is not convex in ν: components that begin in one mode may stay in it.

    Parameters
    ----------
    components
        How many Gaussians.
    """

    components: int = eqx.field(static=True)
    measures: ClassVar[type] = GaussianMixture

    def __check_init__(self) -> None:
        require_count("MixtureOfGaussians components", self.components, 2, "one is MeanFieldGaussian().")

    def parameters(self, initial: GaussianMixture) -> tuple[Particles, Particles, Float[Array, " k"]]:
        if len(initial.weights) != self.components:
            raise ValueError(
                f"initial has {len(initial.weights)} components, and MixtureOfGaussians {self.components}; "
                "give both the same number, or pass particles."
            )
        return initial.means, jax.tree.map(jnp.log, initial.scales), jnp.log(initial.weights)

    def member(self, parameters: tuple[Particles, Particles, Float[Array, " k"]]) -> GaussianMixture:
        means, log_scales, log_weights = parameters
        return GaussianMixture(means, jax.tree.map(jnp.exp, log_scales), jax.nn.softmax(log_weights))

    def moment_matched(self, particles: Empirical) -> GaussianMixture:
        """Components sit at some of the particles, evenly taken, each as wide as all of them over their
        number."""
        n = particle_count(particles.particles)
        if n < self.components:
            raise ValueError(f"{n} particles are too few for {self.components} components; pass more.")
        means = jax.tree.map(
            lambda leaf: leaf[:: n // self.components][: self.components], particles.particles
        )
        deviations = particles.moment_matched().deviations()
        scales = jax.tree.map(lambda m, s: jnp.broadcast_to(s / self.components, m.shape), means, deviations)
        return GaussianMixture(means, scales)
