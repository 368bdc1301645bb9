"""Kernels κ(θ, θ′) on pytrees: their formulas. How sums of them are computed is `interactions`."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import (
    Parameters,
    is_concrete,
    particle_count,
    squared_distances,
    squared_norm,
    strong,
    subtract,
)
from measureflow.core.showing import one_line, shown
from measureflow.core.validation import positive_number, require_particles
from measureflow.spaces.measures import Gaussian


class AbstractKernel(eqx.Module):
    """A symmetric positive-definite function of two points. Kernels add, and multiply by numbers > 0."""

    # NumPy scalars on the left must leave the multiplication to us.
    __array_ufunc__: ClassVar[None] = None

    @abc.abstractmethod
    def __call__(self, x: Parameters, y: Parameters) -> Float[Array, ""]:
        """κ(x, y)."""

    def __repr__(self) -> str:
        return one_line(self)

    def on(self, features: Callable[[Parameters], PyTree]) -> "PullBack":
        """The kernel κ(f(θ), f(θ′)): repulsion in the space of features f.

        Parameters
        ----------
        features
            f, a function of one θ with values in any pytree of arrays.
        """
        return PullBack(self, features)

    def __add__(self, other: "AbstractKernel") -> "AbstractKernel":
        return _combine([*_terms(self), *_terms(other)])

    def __rmul__(self, weight: Any) -> "AbstractKernel":
        factor = positive_number("kernel weight", weight, "to leave a kernel out, drop the term.")
        return _combine([(factor * w, kernel) for w, kernel in _terms(self)])

    __mul__ = __rmul__


class AbstractRadialKernel(AbstractKernel):
    """κ(x, y) = φ(‖x − y‖²), with profile φ and slope φ′: ∇₁κ = 2 φ′(‖x − y‖²)(x − y)."""

    @abc.abstractmethod
    def profile(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        """φ(s)."""

    @abc.abstractmethod
    def slope(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        """φ′(s). Where φ has a cusp at s = 0 it is 0 there, so that ∇₁κ(θ, θ) = 0."""

    def precisions(self, key: Key[Array, ""], count: int) -> Float[Array, " count"]:
        """Draws of t ≥ 0 with φ(s) = φ(0) E exp(−ts/2): kernels that are radial in every dimension are such
        mixtures (Schoenberg, 1938). √t Z, with Z standard normal, is then a frequency of the kernel."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `precisions`, which random features need; add the method, or use "
            "mf.RandomBatches(size)."
        )

    def __call__(self, x: Parameters, y: Parameters) -> Float[Array, ""]:
        return radial(self, squared_norm(subtract(x, y)))


@jax.custom_jvp
def radial(kernel: AbstractRadialKernel, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
    """φ(s), differentiable everywhere: autodiff of √s would give NaN for coincident particles."""
    return kernel.profile(squared_distance)


@radial.defjvp
def _radial_jvp(primals: tuple, tangents: tuple) -> tuple:
    (kernel, s), (kernel_tangent, s_tangent) = primals, tangents
    value, tangent = jax.jvp(lambda k: k.profile(s), (kernel,), (kernel_tangent,))
    return value, tangent + kernel.slope(s) * s_tangent


def _scaled_distance(squared_distance: Float[Array, "..."], lengthscale: Array) -> Float[Array, "..."]:
    """√s/σ, with derivative 0 instead of ∞ at s = 0."""
    coincident = squared_distance <= 0
    positive = jnp.where(coincident, 1.0, squared_distance)
    return jnp.where(coincident, 0.0, positive * jax.lax.rsqrt(positive)) / lengthscale


def _lengthscale(kernel: str) -> Callable[[Any], Float[Array, ""]]:
    return functools.partial(positive_number, f"{kernel} lengthscale", remedy="see mf.median_heuristic.")


class SquaredExponential(AbstractRadialKernel):
    """κ(x, y) = exp(−‖x − y‖² / (2σ²)).

    Parameters
    ----------
    lengthscale
        σ > 0; see `median_heuristic`.
    """

    lengthscale: Float[Array, ""] = eqx.field(converter=_lengthscale("SquaredExponential"))

    def profile(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        # No division for every pair.
        return jnp.exp((-0.5 / self.lengthscale**2) * squared_distance)

    def slope(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        return (-0.5 / self.lengthscale**2) * self.profile(squared_distance)

    def precisions(self, key: Key[Array, ""], count: int) -> Float[Array, " count"]:
        """1/σ²."""
        return jnp.broadcast_to(1 / self.lengthscale**2, (count,))


class Matern(AbstractRadialKernel):
    """Matérn, with r = ‖x − y‖/σ:

    ν = ½: exp(−r);   ν = 3⁄2: (1 + √3 r) exp(−√3 r);   ν = 5⁄2: (1 + √5 r + 5r²/3) exp(−√5 r).

    Parameters
    ----------
    nu
        ν: 0.5, 1.5 or 2.5.
    lengthscale
        σ > 0; see `median_heuristic`.
    """

    nu: float = eqx.field(static=True)
    lengthscale: Float[Array, ""] = eqx.field(converter=_lengthscale("Matern"))

    def __check_init__(self) -> None:
        if self.nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"Matern nu must be 0.5, 1.5 or 2.5, got {self.nu}; pick one of these.")

    def profile(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        u = math.sqrt(2 * self.nu) * _scaled_distance(squared_distance, self.lengthscale)
        polynomial = {0.5: jnp.ones_like(u), 1.5: 1 + u, 2.5: 1 + u + u**2 / 3}[self.nu]
        return polynomial * jnp.exp(-u)

    def slope(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        u = math.sqrt(2 * self.nu) * _scaled_distance(squared_distance, self.lengthscale)
        if self.nu == 0.5:
            factor = jnp.where(u > 0, -0.5 / jnp.where(u > 0, u, 1.0), 0.0)
        else:
            factor = {1.5: -1.5 * jnp.ones_like(u), 2.5: -(5 / 6) * (1 + u)}[self.nu]
        return factor * jnp.exp(-u) / self.lengthscale**2

    def precisions(self, key: Key[Array, ""], count: int) -> Float[Array, " count"]:
        """2ν/(σ²χ²), with 2ν degrees of freedom: frequencies are Student's, and have a mean for ν > ½."""
        if self.nu == 0.5:
            raise ValueError(
                "random features of Matern(nu=0.5) have infinite variance, since the kernel has a cusp; use "
                "nu=1.5 or 2.5, or mf.RandomBatches(size)."
            )
        chi_squared = jax.random.chisquare(key, 2 * self.nu, (count,), self.lengthscale.dtype)
        return 2 * self.nu / (self.lengthscale**2 * chi_squared)


class InverseMultiquadric(AbstractRadialKernel):
    """κ(x, y) = (1 + ‖x − y‖²/σ²)^(−½).

    Parameters
    ----------
    lengthscale
        σ > 0; see `median_heuristic`.
    """

    lengthscale: Float[Array, ""] = eqx.field(converter=_lengthscale("InverseMultiquadric"))

    def profile(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.lax.rsqrt(1 + squared_distance / self.lengthscale**2)

    def slope(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        return -0.5 * self.profile(squared_distance) ** 3 / self.lengthscale**2

    def precisions(self, key: Key[Array, ""], count: int) -> Float[Array, " count"]:
        """χ²/σ², with one degree of freedom: E exp(−sχ²/(2σ²)) = (1 + s/σ²)^(−½)."""
        return jax.random.chisquare(key, 1.0, (count,), self.lengthscale.dtype) / self.lengthscale**2


class RadialCombination(AbstractRadialKernel):
    """Σₖ wₖ κₖ of radial kernels, which is radial: φ = Σₖ wₖ φₖ."""

    weights: tuple[Float[Array, ""], ...]
    kernels: tuple[AbstractRadialKernel, ...]

    def __repr__(self) -> str:
        return _sum_in_words(self.weights, self.kernels)

    def profile(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        return _weighted(self.weights, [kernel.profile(squared_distance) for kernel in self.kernels])

    def slope(self, squared_distance: Float[Array, "..."]) -> Float[Array, "..."]:
        return _weighted(self.weights, [kernel.slope(squared_distance) for kernel in self.kernels])

    def precisions(self, key: Key[Array, ""], count: int) -> Float[Array, " count"]:
        """Those of κₖ with probability wₖφₖ(0)/φ(0)."""
        of_choice, *keys = jax.random.split(key, len(self.kernels) + 1)
        at_zero = [kernel.profile(jnp.zeros(())) for kernel in self.kernels]
        shares = jnp.stack(self.weights) * jnp.stack(at_zero)
        chosen = jax.random.categorical(of_choice, jnp.log(shares), shape=(count,))
        drawn = jnp.stack([k.precisions(of, count) for k, of in zip(self.kernels, keys, strict=True)])
        return drawn[chosen, jnp.arange(count)]


class KernelCombination(AbstractKernel):
    """Σₖ wₖ κₖ(x, y), where not all κₖ are radial."""

    weights: tuple[Float[Array, ""], ...]
    kernels: tuple[AbstractKernel, ...]

    def __repr__(self) -> str:
        return _sum_in_words(self.weights, self.kernels)

    def __call__(self, x: Parameters, y: Parameters) -> Float[Array, ""]:
        return _weighted(self.weights, [kernel(x, y) for kernel in self.kernels])


class PullBack(AbstractKernel):
    """κ_f(θ, θ′) = κ(f(θ), f(θ′)): a kernel on features f, such as predictions at anchor inputs."""

    kernel: AbstractKernel
    features: Callable[[Parameters], PyTree]

    def __check_init__(self) -> None:
        if not callable(self.features):
            raise TypeError(
                f"features must be a function θ ↦ f(θ), got {self.features!r}; "
                "for one layer pass `lambda theta: theta['layer']`."
            )

    def __repr__(self) -> str:
        return f"{self.kernel!r}.on({shown(self.features)})"

    def __call__(self, x: Parameters, y: Parameters) -> Float[Array, ""]:
        return self.kernel(self.features(x), self.features(y))


class Whiten(eqx.Module):
    """The features scale⁻¹(θ − m): coordinates in which the Gaussian `prior` is standard normal.

    Parameters
    ----------
    prior
        The Gaussian whose mean m and scale are used.
    """

    prior: Gaussian

    def __repr__(self) -> str:
        return one_line(self)

    def __call__(self, theta: Parameters) -> Parameters:
        return self.prior.to_standard(theta)


def median_heuristic(particles: PyTree) -> Float[Array, ""]:
    """σ with σ² = median of ‖θᵢ − θⱼ‖² over pairs i < j, divided by 2 (Garreau et al., 2017).

    Parameters
    ----------
    particles
        At least two: draws from the reference, or from Q₀ where the reference is flat.
    """
    particles = require_particles("median_heuristic particles", particles)
    n = particle_count(particles)
    if n < 2:
        raise ValueError(f"the median heuristic needs at least 2 particles, got {n}; draw more.")
    pairs = squared_distances(particles, particles)[jnp.triu_indices(n, 1)]
    sigma = jnp.sqrt(jnp.median(pairs) / 2)
    if is_concrete(sigma) and not np.asarray(sigma) > 0:
        raise ValueError(
            f"the median heuristic is {sigma} for these {n} particles: more than half of all pairs "
            "coincide or are not finite; pass a lengthscale by hand, or particles from the prior."
        )
    return sigma


def _sum_in_words(weights: tuple[Array, ...], kernels: tuple[AbstractKernel, ...]) -> str:
    return " + ".join(f"{shown(w)} * {kernel!r}" for w, kernel in zip(weights, kernels, strict=True))


def _weighted(weights: tuple[Array, ...], values: list[Array]) -> Array:
    terms = [w.astype(v.dtype) * v for w, v in zip(weights, values, strict=True)]
    return sum(terms[1:], start=terms[0])


def _terms(kernel: AbstractKernel) -> list[tuple[Array, AbstractKernel]]:
    """Kernels are combinations of one or more weighted terms; nested ones are laid flat."""
    if isinstance(kernel, RadialCombination | KernelCombination):
        return list(zip(kernel.weights, kernel.kernels, strict=True))
    if not isinstance(kernel, AbstractKernel):
        raise TypeError(
            f"only kernels can be added to a kernel, got {kernel!r}; scale kernels with w * kernel."
        )
    return [(strong(1.0), kernel)]


def _combine(terms: list[tuple[Array, AbstractKernel]]) -> AbstractKernel:
    weights = tuple(weight for weight, _ in terms)
    radial_kernels = tuple(kernel for _, kernel in terms if isinstance(kernel, AbstractRadialKernel))
    if len(radial_kernels) == len(terms):
        return RadialCombination(weights, radial_kernels)
    return KernelCombination(weights, tuple(kernel for _, kernel in terms))
