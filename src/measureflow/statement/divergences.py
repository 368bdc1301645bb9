"""Divergences D(Q, P), their weighted sums, and the free energies they are."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from measureflow.core.pytrees import Parameters, dimension, squared_norm, strong
from measureflow.core.validation import positive_number
from measureflow.numerics.integration import Integral
from measureflow.spaces.embeddings import NoClosedFormError, kernel_mean_embedding, mean_kernel
from measureflow.spaces.kernels import AbstractKernel
from measureflow.spaces.measures import AbstractMeasure, Empirical, Flat, Gaussian
from measureflow.statement.free_energy import FreeEnergy


class AbstractRegulariser(eqx.Module):
    """A convex functional of Q. Regularisers add, and multiply by weights > 0."""

    # NumPy scalars on the left must leave the multiplication to us.
    __array_ufunc__: ClassVar[None] = None

    @abc.abstractmethod
    def terms(self) -> "tuple[tuple[Float[Array, ''], AbstractDivergence], ...]":
        """The weighted divergences it is the sum of."""

    def free_energy(self) -> FreeEnergy:
        """Its normal form (V, W, τ), up to a constant that does not depend on Q."""
        energies = [weight * divergence.normal_form() for weight, divergence in self.terms()]
        return sum(energies[1:], start=energies[0])

    def __add__(self, other: "AbstractRegulariser") -> "Regulariser":
        if not isinstance(other, AbstractRegulariser):
            raise TypeError(
                f"only regularisers can be added to a regulariser, got {other!r}; see KL and SquaredMMD."
            )
        return Regulariser(*self.terms(), *other.terms())

    def __rmul__(self, weight: Any) -> "Regulariser":
        names = " + ".join(divergence.name for _, divergence in self.terms())
        factor = positive_number(f"{names} weight", weight, f"to leave {names} out, drop the term.")
        return Regulariser(*[(factor * w, divergence) for w, divergence in self.terms()])

    __mul__ = __rmul__


class Regulariser(AbstractRegulariser):
    """Σₖ wₖ Dₖ(Q, Pₖ)."""

    weights: tuple[Float[Array, ""], ...]
    divergences: "tuple[AbstractDivergence, ...]"

    def __init__(self, *terms: "tuple[Float[Array, ''], AbstractDivergence]"):
        self.weights, self.divergences = zip(*terms, strict=True)

    def terms(self) -> "tuple[tuple[Float[Array, ''], AbstractDivergence], ...]":
        return tuple(zip(self.weights, self.divergences, strict=True))


class AbstractDivergence(AbstractRegulariser):
    """A single D(·, P), of weight one."""

    name: ClassVar[str]
    reference: eqx.AbstractVar[AbstractMeasure]

    def terms(self) -> "tuple[tuple[Float[Array, ''], AbstractDivergence], ...]":
        return ((strong(1.0), self),)

    @abc.abstractmethod
    def normal_form(self) -> FreeEnergy:
        """(V, W, τ)."""

    @abc.abstractmethod
    def value(self, measure: Empirical | Gaussian, integral: Integral) -> Float[Array, ""]:
        """D(Q, P), in closed form where there is one, else with `integral` for ∫ · dQ."""


def negative_log_density(reference: AbstractMeasure, theta: Parameters) -> Float[Array, ""]:
    """−log p(θ)."""
    return -reference.log_density(theta)


class KL(AbstractDivergence):
    """KL(Q, P) = ∫ log(q/p) dQ:   V = −log p,   τ = 1."""

    reference: AbstractMeasure
    name: ClassVar[str] = "KL"

    def __check_init__(self) -> None:
        if not isinstance(self.reference, AbstractMeasure):
            raise TypeError(f"KL reference must be a measure, got {self.reference!r}; see mf.Gaussian.")
        if not self.reference.has_full_support:
            if isinstance(self.reference, Empirical):
                problem = (
                    "KL to a reference without a density, got Empirical: it is infinite for every other "
                    "measure; use a Gaussian reference, or SquaredMMD, which needs no density."
                )
                raise ValueError(problem)
            raise ValueError(
                f"KL to a reference without full support, got {type(self.reference).__name__}: there is no "
                "gradient outside its support; use a smooth prior such as mf.Gaussian, or move to "
                "unbounded coordinates by a bijection."
            )

    def normal_form(self) -> FreeEnergy:
        flat = isinstance(self.reference, Flat)
        potential = None if flat else eqx.Partial(negative_log_density, self.reference)
        return FreeEnergy(potential=potential, temperature=strong(1.0))

    def value(self, measure: Empirical | Gaussian, integral: Integral) -> Float[Array, ""]:
        if isinstance(measure, Gaussian) and isinstance(self.reference, Gaussian):
            return kl_of_gaussians(measure, self.reference)
        cross_entropy = integral.mean(eqx.Partial(negative_log_density, self.reference))
        return cross_entropy - measure.entropy()


def kl_of_gaussians(q: Gaussian, p: Gaussian) -> Float[Array, ""]:
    """½ (tr(Σ_P⁻¹Σ_Q) + ‖m_Q − m_P‖²_{Σ_P⁻¹} − J) + log |S_P| − log |S_Q|."""
    number = dimension(q.mean)
    mean_term = squared_norm(p.to_standard(q.mean))
    if q.full_rank or p.full_rank:
        # tr(Σ_P⁻¹Σ_Q): every row of S_Q, whitened by P.
        matrix = q.factor().T
        _, unravel = ravel_pytree(q.mean)
        whitened = jax.vmap(lambda row: p.whiten(unravel(row)))(matrix)
        trace = squared_norm(whitened)
    else:
        ratios = jax.tree.map(lambda m, a, b: jnp.broadcast_to(a / b, m.shape), q.mean, q.scale, p.scale)
        trace = squared_norm(ratios)
    return 0.5 * (trace + mean_term - number) + p.log_determinant() - q.log_determinant()


def _minus_twice(embedding: Callable[[Parameters], Float[Array, ""]], theta: Parameters) -> Float[Array, ""]:
    return -2 * embedding(theta)


class SquaredMMD(AbstractDivergence):
    """MMD²(Q, P) = ∬κ dQdQ − 2∬κ dQdP + ∬κ dPdP:   V = −2μ_P,   W = 2κ.

    The embedding μ_P is found when the divergence is stated, so that a missing closed form is an
    error there and not in the middle of a run.
    """

    reference: AbstractMeasure
    kernel: AbstractKernel
    embedding: Callable[[Parameters], Float[Array, ""]] | None
    name: ClassVar[str] = "MMD²"

    def __init__(self, reference: AbstractMeasure, kernel: AbstractKernel):
        if not isinstance(reference, AbstractMeasure) or not isinstance(kernel, AbstractKernel):
            raise TypeError(
                f"SquaredMMD takes (reference, kernel), got ({type(reference).__name__}, "
                f"{type(kernel).__name__}); for example SquaredMMD(prior, mf.SquaredExponential(1.0))."
            )
        self.reference, self.kernel = reference, kernel
        self.embedding = kernel_mean_embedding(kernel, reference)

    def normal_form(self) -> FreeEnergy:
        potential = None if self.embedding is None else eqx.Partial(_minus_twice, self.embedding)
        return FreeEnergy(potential=potential, interaction=2.0 * self.kernel)

    def value(self, measure: Empirical | Gaussian, integral: Integral) -> Float[Array, ""]:
        """Exact for particles. With a flat reference, whose other terms are infinite constants, it
        is ∬κ dQdQ alone."""
        own = _closed_or(
            lambda: mean_kernel(self.kernel, measure, measure), lambda: integral.double(self.kernel)
        )
        embedding = self.embedding
        if embedding is None:
            return own
        cross = _closed_or(
            lambda: mean_kernel(self.kernel, measure, self.reference),
            lambda: integral.mean(embedding),
        )
        return own - 2 * cross + mean_kernel(self.kernel, self.reference, self.reference)


def _closed_or(closed: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
    try:
        return closed()
    except NoClosedFormError:
        return otherwise()
