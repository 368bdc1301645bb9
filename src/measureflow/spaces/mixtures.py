"""Mixtures of Gaussians: a measure with several modes, in closed form."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.noise import standard_normal
from measureflow.core.pytrees import Parameters, Particles, particle_count, strong, total
from measureflow.core.showing import counted
from measureflow.core.validation import require_finite, require_positive, require_same_shape, typed_key
from measureflow.saving.registry import saved
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure


@saved
class GaussianMixture(AbstractMeasure):
    """Σₖ wₖ N(mₖ, diag(sₖ)²).

    Parameters
    ----------
    means
        mₖ, a pytree whose leaves share a leading axis, one row per component.
    scales
        sₖ, standard deviations, a pytree like the means.
    weights
        wₖ > 0, one per component; they are divided by their sum. None is equal weights.
    """

    means: Particles
    scales: Particles
    weights: Float[Array, " k"]

    def __init__(self, means: PyTree, scales: PyTree, weights: Float[Array, " k"] | None = None):
        remedy = "one row per component, a pytree like the means."
        self.means = require_finite("GaussianMixture means", means, remedy)
        if jax.tree.structure(scales) != jax.tree.structure(self.means):
            raise ValueError(
                f"GaussianMixture scales have structure {jax.tree.structure(scales)}, the means "
                f"{jax.tree.structure(self.means)}; pass {remedy}"
            )
        require_same_shape("GaussianMixture scales", scales, self.means)
        require_positive("GaussianMixture scales", scales, "they are standard deviations.")
        self.scales = jax.tree.map(lambda m, s: strong(s).astype(m.dtype), self.means, scales)
        number, dtype = particle_count(self.means), jax.tree.leaves(self.means)[0].dtype
        weights = jnp.ones(number) if weights is None else jnp.asarray(weights)
        if weights.shape != (number,):
            raise ValueError(
                f"GaussianMixture weights have shape {weights.shape}, and there are {number} components; "
                "pass one number > 0 for each."
            )
        require_positive("GaussianMixture weights", weights, "leave a component without weight out.")
        self.weights = (weights / jnp.sum(weights)).astype(dtype)

    def __repr__(self) -> str:
        number = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(self.means))
        return f"GaussianMixture({counted(len(self.weights), 'component')}, {counted(number, 'dimension')})"

    @property
    def has_full_support(self) -> bool:
        return True

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        choice_key, noise_key = jax.random.split(typed_key(key))
        chosen = jax.random.choice(choice_key, len(self.weights), (n,), p=self.weights)
        noise = standard_normal(noise_key, n, self.template())
        return jax.tree.map(lambda m, s, z: m[chosen] + s[chosen] * z, self.means, self.scales, noise)

    def strata(self, key: Key[Array, ""], each: int) -> Empirical:
        """As many draws from every component, weighted: ∫ f dQ by them is unbiased, and differentiable in
        means, scales and weights."""
        number = len(self.weights)
        noise = standard_normal(key, number * each, self.template())

        def drawn(m: Array, s: Array, z: Array) -> Array:
            z = z.reshape(number, each, *m.shape[1:])
            return (m[:, None] + s[:, None] * z).reshape(number * each, *m.shape[1:])

        points = jax.tree.map(drawn, self.means, self.scales, noise)
        return Empirical(points, jnp.repeat(self.weights / each, each))

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        def of_component(mean: Parameters, scale: Parameters) -> Float[Array, ""]:
            terms = jax.tree.map(
                lambda x, m, s: -0.5 * ((x - m) / s) ** 2 - jnp.log(s) - 0.5 * math.log(2 * math.pi),
                theta,
                mean,
                scale,
            )
            return total(terms)

        densities = jax.vmap(of_component)(self.means, self.scales)
        return logsumexp(densities + jnp.log(self.weights))

    def template(self) -> Parameters:
        return jax.tree.map(lambda leaf: leaf[0], self.means)
