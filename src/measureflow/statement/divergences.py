"""Divergences D(Q, P), each in its normal form."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters, dimension, squared_norm, strong
from measureflow.numerics.integration import Points
from measureflow.spaces.embeddings import NoClosedFormError, kernel_mean_embedding, mean_kernel
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import AbstractKernel, PullBack
from measureflow.spaces.measures import AbstractMeasure, Flat, Gaussian
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.functionals import AbstractFunctional
from measureflow.statement.words import Words, is_characteristic, kernel_words, number


class AbstractRegulariser(AbstractFunctional):
    """D(Q, P): a functional that sees no data. One that has a field `reference` P takes the shape of θ from
    it."""

    def references(self) -> tuple[AbstractMeasure, ...]:
        reference = getattr(self, "reference", None)
        return (reference,) if isinstance(reference, AbstractMeasure) else ()

    def template(self) -> Parameters | None:
        return next((reference.template() for reference in self.references()), None)

    def words(self, weight: Float[Array, ""]) -> Words:
        names = ["Q", *(type(reference).__name__ for reference in self.references())]
        formula = f"{number(weight)}·{self.name}({', '.join(names)})"
        return Words(formula, rest=formula)


def negative_log_density(reference: AbstractMeasure, theta: Parameters) -> Float[Array, ""]:
    """−log p(θ)."""
    return -reference.log_density(theta)


class KL(AbstractRegulariser):
    """KL(Q, P) = ∫ log(q/p) dQ:   V = −log p,   τ = 1.

    Parameters
    ----------
    reference
        P: a measure with full support, such as `Gaussian`, or `Flat`.
    """

    reference: AbstractMeasure
    name: ClassVar[str] = "KL"
    convexity: ClassVar[str] = "strictly convex"

    def __init__(self, reference: Any = None):
        if not isinstance(reference, AbstractMeasure):
            raise TypeError(
                f"KL reference must be a measure, got {reference!r}; pass KL(mf.Gaussian(mean, scale)), or "
                "KL(mf.Flat()) where the loss alone is −log of a density."
            )
        if not reference.has_full_support:
            raise ValueError(_without_full_support(reference))
        self.reference = reference

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        flat = isinstance(self.reference, Flat)
        potential = None if flat else eqx.Partial(negative_log_density, self.reference)
        return FreeEnergy(potential=potential, temperature=strong(1.0))

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        """The entropy of particles is estimated from distances to neighbours, where N is large against J."""
        return self._cross_entropy(measure) - measure.entropy()

    def gaussian_value(self, measure: Gaussian, points: Points, batch: PyTree = None) -> Float[Array, ""]:
        if isinstance(self.reference, Gaussian):
            return kl_of_gaussians(measure, self.reference)
        return self._cross_entropy(points.measure) - measure.entropy()

    def _cross_entropy(self, measure: Empirical) -> Float[Array, ""]:
        negative = jax.vmap(eqx.Partial(negative_log_density, self.reference))
        return jnp.sum(measure.masses() * negative(measure.particles))

    def words(self, weight: Float[Array, ""]) -> Words:
        flat = isinstance(self.reference, Flat)
        return Words(
            super().words(weight).formula,
            potential="" if flat else f"− {number(weight)}·log p",
            temperature=number(weight),
        )


def _without_full_support(reference: AbstractMeasure) -> str:
    if isinstance(reference, Empirical):
        return (
            "KL to a reference without a density, got Empirical: it is infinite for every other "
            "measure; use a Gaussian reference, or SquaredMMD, which needs no density."
        )
    return (
        f"KL to a reference without full support, got {type(reference).__name__}: there is no "
        "gradient outside its support; use a smooth prior such as mf.Gaussian, or move to "
        "unbounded coordinates by a bijection."
    )


def kl_of_gaussians(q: Gaussian, p: Gaussian) -> Float[Array, ""]:
    """½ (tr(Σ_P⁻¹Σ_Q) + ‖m_Q − m_P‖²_{Σ_P⁻¹} − J) + log |S_P| − log |S_Q|."""
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
    return 0.5 * (trace + mean_term - dimension(q.mean)) + p.log_determinant() - q.log_determinant()


def _minus_twice(embedding: Callable[[Parameters], Float[Array, ""]], theta: Parameters) -> Float[Array, ""]:
    return -2 * embedding(theta)


class SquaredMMD(AbstractRegulariser):
    """MMD²(Q, P) = ∬κ dQdQ − 2∬κ dQdP + ∬κ dPdP:   V = −2μ_P,   W = 2κ.

    The embedding μ_P is found when the divergence is stated, so that a missing closed form is an
    error there and not in the middle of a run.

    Parameters
    ----------
    reference
        P.
    kernel
        κ.
    """

    reference: AbstractMeasure
    kernel: AbstractKernel
    embedding: Callable[[Parameters], Float[Array, ""]] | None = eqx.field(repr=False)
    name: ClassVar[str] = "MMD²"
    convexity: ClassVar[str] = "convex"

    def __init__(self, reference: Any = None, kernel: Any = None):
        if not isinstance(reference, AbstractMeasure) or not isinstance(kernel, AbstractKernel):
            raise TypeError(
                f"SquaredMMD takes (reference, kernel), got ({type(reference).__name__}, "
                f"{type(kernel).__name__}); for example SquaredMMD(prior, mf.SquaredExponential(1.0))."
            )
        self.reference, self.kernel = reference, kernel
        self.embedding = kernel_mean_embedding(kernel, reference)

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        potential = None if self.embedding is None else eqx.Partial(_minus_twice, self.embedding)
        return FreeEnergy(potential=potential, interaction=2.0 * self.kernel)

    def constant(self, batch: PyTree = None) -> Float[Array, ""]:
        """∬κ dPdP; 0 for a flat reference, whose constants are infinite."""
        if self.embedding is None:
            return jnp.zeros(())
        return mean_kernel(self.kernel, self.reference, self.reference)

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        """Exact. With a flat reference, whose other terms are infinite constants, it is ∬κ dQdQ alone."""
        own = mean_kernel(self.kernel, measure, measure)
        if self.embedding is None:
            return own
        return own - 2 * mean_kernel(self.kernel, measure, self.reference) + self.constant()

    def gaussian_value(self, measure: Gaussian, points: Points, batch: PyTree = None) -> Float[Array, ""]:
        own = _closed_or(
            lambda: mean_kernel(self.kernel, measure, measure), lambda: points.double(self.kernel)
        )
        embedding = self.embedding
        if embedding is None:
            return own
        cross = _closed_or(
            lambda: mean_kernel(self.kernel, measure, self.reference),
            lambda: points.measure.integrate(embedding),
        )
        return own - 2 * cross + self.constant()

    def words(self, weight: Float[Array, ""]) -> Words:
        doubled = number(2 * weight)
        holds = "holds" if is_characteristic(self.kernel) else _not_characteristic(self.kernel)
        return Words(
            super().words(weight).formula,
            potential="" if self.embedding is None else f"− {doubled}·μ_P",
            interaction=f"{doubled}·{kernel_words(self.kernel)}",
            notes=(f"κ characteristic ({kernel_words(self.kernel)}): {holds}",),
        )


def _not_characteristic(kernel: AbstractKernel) -> str:
    is_pulled_back = isinstance(kernel, PullBack)
    return "not known to hold (features may lose information)" if is_pulled_back else "not known to hold"


def _closed_or(closed: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
    try:
        return closed()
    except NoClosedFormError:
        return otherwise()
