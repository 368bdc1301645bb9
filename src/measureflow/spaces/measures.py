"""Measures on parameter space: references P, initial laws Q₀, and the results Q of a flow."""

import abc
import math
from numbers import Real
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Key, PyTree
from numpyro.distributions import Delta, Distribution, constraints

from measureflow.core.noise import standard_normal
from measureflow.core.pytrees import (
    Parameters,
    Particles,
    dimension,
    is_concrete,
    strong,
    subtract,
    total,
)
from measureflow.core.showing import counted, few_numbers, one_line, or_fields
from measureflow.core.validation import (
    positive_number,
    require_count,
    require_finite,
    require_positive,
    require_same_shape,
    typed_key,
)
from measureflow.saving.registry import saved


def _number_of_draws(n: Any) -> int:
    return require_count("n", n, 1, "it counts the draws.")


class AbstractMeasure(eqx.Module):
    """A measure on the space of parameters θ, a pytree of arrays."""

    def __repr__(self) -> str:
        return one_line(self)

    @property
    @abc.abstractmethod
    def has_full_support(self) -> bool:
        """Whether it is positive everywhere, as KL(·, P) and its gradient need."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        """n independent draws: the pytree of θ with a leading axis n.

        Parameters
        ----------
        key
            A JAX random key.
        n
            How many.
        """

    @abc.abstractmethod
    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        """log p(θ) with respect to Lebesgue measure."""

    @abc.abstractmethod
    def template(self) -> Parameters | None:
        """Any point of the space, for its structure and shapes; None if the measure is on any space."""


def _gaussian_scale(mean: Parameters, scale: PyTree) -> tuple[PyTree, bool]:
    """The scale as one array per leaf of the mean, or as a matrix over the ravelled mean."""
    structure, number = jax.tree.structure(mean), dimension(mean)
    leaves = jax.tree.leaves(scale)
    remedy = (
        "pass standard deviations (a number > 0, or a pytree like the mean), or a lower-triangular matrix "
        f"of shape {(number, number)}."
    )
    if any(not hasattr(leaf, "shape") and not isinstance(leaf, Real) for leaf in leaves):
        raise TypeError(f"Gaussian scale must hold numbers, got {scale!r}; {remedy}")
    if leaves and leaves[0] is scale and jnp.ndim(scale) == 0:
        deviation = positive_number("Gaussian scale", scale, remedy)
        return jax.tree.map(lambda m: deviation.astype(m.dtype), mean), False
    shapes = [leaf.shape for leaf in jax.tree.leaves(mean)]
    if jax.tree.structure(scale) == structure and all(
        jnp.shape(leaf) in ((), shape) for leaf, shape in zip(leaves, shapes, strict=True)
    ):
        require_positive("Gaussian scale", scale, remedy)
        return jax.tree.map(lambda m, s: strong(s).astype(m.dtype), mean, scale), False
    if len(leaves) == 1 and jnp.shape(leaves[0]) == (number, number):
        return _lower_triangular(strong(leaves[0]).astype(ravel_pytree(mean)[0].dtype)), True
    raise ValueError(
        f"Gaussian scale has shapes {jax.tree.map(jnp.shape, scale)}, the mean {shapes}; {remedy}"
    )


def _lower_triangular(matrix: Float[Array, "J J"]) -> Float[Array, "J J"]:
    if is_concrete(matrix):
        values = np.asarray(matrix)
        above = np.abs(np.triu(values, 1)).max(initial=0.0)
        if not np.all(np.isfinite(values)) or above > 1e-6 * np.abs(values).max():
            raise ValueError(
                f"Gaussian scale must be lower-triangular and finite, got {matrix}; "
                "pass jnp.linalg.cholesky(covariance)."
            )
        require_positive(
            "Gaussian scale diagonal", np.diagonal(values), "pass jnp.linalg.cholesky(covariance)."
        )
    return matrix


@saved
class Gaussian(AbstractMeasure):
    """N(mean, scale·scaleᵀ): p(θ) = |2πΣ|^-½ exp(−½ (θ−m)ᵀ Σ⁻¹ (θ−m)).

    Parameters
    ----------
    mean
        m, a pytree of arrays: it gives the shape of θ.
    scale
        Standard deviations, a number > 0 or a pytree like the mean; or a lower-triangular matrix over the
        ravelled mean.
    """

    mean: Parameters
    scale: PyTree[Float[Array, "..."]]
    full_rank: bool = eqx.field(static=True)

    def __init__(self, mean: PyTree, scale: PyTree):
        self.mean = require_finite("Gaussian mean", mean, "it gives the shape of θ: a pytree of arrays.")
        self.scale, self.full_rank = _gaussian_scale(self.mean, scale)

    @or_fields
    def __repr__(self) -> str:
        mean, deviations = few_numbers(self.mean), few_numbers(self.deviations())
        if mean is not None and not self.full_rank:
            return f"Gaussian(mean={mean}, scale={deviations})"
        kind = "full covariance" if self.full_rank else "independent coordinates"
        return f"Gaussian({counted(dimension(self.mean), 'dimension')}, {kind})"

    @property
    def has_full_support(self) -> bool:
        return True

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        noise = standard_normal(typed_key(key), _number_of_draws(n), self.mean)
        return jax.vmap(self.from_standard)(noise)

    def from_standard(self, z: Parameters) -> Parameters:
        """m + scale·z: standard normal coordinates to θ (the reparametrisation of FD-GVI)."""
        if self.full_rank:
            flat, unravel = ravel_pytree(z)
            z = unravel(self.scale @ flat)
            return jax.tree.map(jnp.add, self.mean, z)
        return jax.tree.map(lambda m, s, x: m + s * x, self.mean, self.scale, z)

    def to_standard(self, theta: Parameters) -> Parameters:
        """scale⁻¹(θ − m): θ in coordinates whitened by this measure."""
        require_same_shape("θ", theta, self.mean)
        return self.whiten(subtract(theta, self.mean))

    def whiten(self, difference: Parameters) -> Parameters:
        """scale⁻¹ · difference."""
        if self.full_rank:
            flat, unravel = ravel_pytree(difference)
            return unravel(solve_triangular(self.scale, flat, lower=True))
        return jax.tree.map(jnp.divide, difference, self.scale)

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        z = self.to_standard(theta)
        squares = total(jax.tree.map(jnp.square, z))
        return -0.5 * (squares + dimension(self.mean) * math.log(2 * math.pi)) - self.log_determinant()

    def log_determinant(self) -> Float[Array, ""]:
        """log |scale|."""
        if self.full_rank:
            return jnp.sum(jnp.log(jnp.diagonal(self.scale)))
        return total(jax.tree.map(lambda m, s: jnp.broadcast_to(jnp.log(s), m.shape), self.mean, self.scale))

    def entropy(self) -> Float[Array, ""]:
        """H = ½ J log(2πe) + log |scale|."""
        return 0.5 * dimension(self.mean) * math.log(2 * math.pi * math.e) + self.log_determinant()

    def deviations(self) -> Parameters:
        """The standard deviation of every coordinate, a pytree like the mean."""
        if self.full_rank:
            _, unravel = ravel_pytree(self.mean)
            return unravel(jnp.sqrt(jnp.sum(jnp.square(self.scale), axis=1)))
        return jax.tree.map(lambda m, s: jnp.broadcast_to(s, m.shape), self.mean, self.scale)

    def factor(self) -> Float[Array, "J J"]:
        """S with Σ = S Sᵀ, over the ravelled mean."""
        return self.scale if self.full_rank else jnp.diag(ravel_pytree(self.deviations())[0])

    def covariance(self) -> Float[Array, "J J"]:
        """Σ over the ravelled mean."""
        return self.factor() @ self.factor().T

    def template(self) -> Parameters:
        return self.mean


@saved
class Uniform(AbstractMeasure):
    """The uniform measure on the box low ≤ θ ≤ high.

    Parameters
    ----------
    low, high
        The two corners of the box, each a pytree shaped like θ.
    """

    low: Parameters
    high: Parameters

    def __init__(self, low: PyTree, high: PyTree):
        remedy = "pass the two corners of the box, each shaped like θ."
        self.low = require_finite("Uniform low", low, remedy)
        self.high = require_finite("Uniform high", high, remedy)
        if jax.tree.map(jnp.shape, self.low) != jax.tree.map(jnp.shape, self.high):
            raise ValueError(
                f"Uniform low and high differ in shape, got {jax.tree.map(jnp.shape, low)} and "
                f"{jax.tree.map(jnp.shape, high)}; give both the shape of θ."
            )
        require_positive("Uniform high − low", subtract(self.high, self.low), "swap the ends.")

    @property
    def has_full_support(self) -> bool:
        return False

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        n = _number_of_draws(n)
        leaves, structure = jax.tree.flatten(self.low)
        keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
        return jax.tree.map(
            lambda k, a, b: jax.random.uniform(k, (n, *a.shape), a.dtype, minval=a, maxval=b),
            keys,
            self.low,
            self.high,
        )

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        widths = jax.tree.map(lambda a, b: jnp.log(b - a), self.low, self.high)
        inside = [
            jnp.all((a <= x) & (x <= b))
            for x, a, b in zip(*map(jax.tree.leaves, (theta, self.low, self.high)), strict=True)
        ]
        return jnp.where(jnp.all(jnp.stack(inside)), -total(widths), -jnp.inf)

    def template(self) -> Parameters:
        return self.low


@saved
class Flat(AbstractMeasure):
    """Lebesgue measure: log p = 0. Not a probability measure, so the theory's promises about
    unique minimisers do not cover it unless the loss itself keeps the mass together."""

    @property
    def has_full_support(self) -> bool:
        return True

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        raise ValueError("a Flat measure cannot be sampled; draw initial particles from a Gaussian.")

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        return jnp.zeros((), jax.tree.leaves(theta)[0].dtype)

    def template(self) -> None:
        return None


def _is_distribution(node: Any) -> bool:
    return isinstance(node, Distribution)


class FromDistribution(AbstractMeasure):
    """A NumPyro distribution, or a pytree of independent ones, as a measure.

    Parameters
    ----------
    distribution
        A NumPyro distribution, or a pytree of them, one for each leaf of θ.
    """

    distribution: PyTree

    def __init__(self, distribution: PyTree):
        leaves = jax.tree.leaves(distribution, is_leaf=_is_distribution)
        if not leaves or not all(map(_is_distribution, leaves)):
            raise TypeError(
                f"FromDistribution takes a NumPyro distribution or a pytree of them, got "
                f"{distribution!r}; wrap constants in numpyro.distributions.Delta."
            )
        self.distribution = distribution

    @property
    def has_full_support(self) -> bool:
        leaves = jax.tree.leaves(self.distribution, is_leaf=_is_distribution)
        supports = [getattr(leaf.support, "base_constraint", leaf.support) for leaf in leaves]
        everywhere = all(support in (constraints.real, constraints.real_vector) for support in supports)
        # A point mass says that its support is the line.
        return everywhere and not any(isinstance(getattr(d, "base_dist", d), Delta) for d in leaves)

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        n = _number_of_draws(n)
        leaves, structure = jax.tree.flatten(self.distribution, is_leaf=_is_distribution)
        keys = jax.random.split(key, len(leaves))
        draws = [leaf.sample(k, (n,)) for leaf, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, draws)

    def log_density(self, theta: Parameters) -> Float[Array, ""]:
        return total(
            jax.tree.map(
                lambda d, x: jnp.sum(d.log_prob(x)), self.distribution, theta, is_leaf=_is_distribution
            )
        )

    def template(self) -> Parameters:
        shapes = jax.eval_shape(lambda: self.sample(jax.random.key(0), 1))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), shapes)
