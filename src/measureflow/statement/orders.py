"""Divergences with an order α, in closed form between Gaussians: for parametric families."""

from typing import Any, ClassVar, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import is_concrete, subtract, total
from measureflow.core.validation import positive_number
from measureflow.numerics.integration import Points
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import Gaussian
from measureflow.statement.divergences import AbstractRegulariser
from measureflow.statement.words import Words, number


def _order(name: str, value: Any) -> Float[Array, ""]:
    order = positive_number(f"{name} order", value, "0.5 is a start; order 1 is mf.KL(reference).")
    if is_concrete(order) and float(order) == 1.0:
        raise ValueError(f"{name} order must not be 1, got {value}: that is KL; use mf.KL(reference).")
    return order


def _require_gaussian(name: str, reference: Any) -> None:
    if not isinstance(reference, Gaussian):
        raise TypeError(
            f"{name} reference must be a Gaussian, got {reference!r}: there is a closed form between "
            "Gaussians alone; pass mf.Gaussian(mean, scale), or use mf.KL(reference)."
        )


def _of_particles(name: str) -> NoReturn:
    raise ValueError(
        f"{name} of particles needs the density of Q, which they do not have; use mf.ParametricFlow(family, "
        "optimiser), whose Q is a Gaussian, or mf.KL(reference) or mf.SquaredMMD(reference, kernel)."
    )


class Renyi(AbstractRegulariser):
    """The Rényi divergence 1/(α − 1) · log ∫ q^α p^{1−α}, between Gaussians

        ½α ‖m_Q − m_P‖²_{Σ⁻¹} − (log|Σ| − (1 − α) log|Σ_Q| − α log|Σ_P|)/(2(α − 1)),   Σ = αΣ_P + (1 − α)Σ_Q

    (Gil, Alajaji and Linder, 2013). As α → 1 it is KL(Q, P). Where α > 1 and Q is too wide for P, Σ is not
    positive definite and the divergence is infinite. For `ParametricFlow`: particles have no density.

    Parameters
    ----------
    reference
        P, a `Gaussian`.
    order
        α > 0, not 1.
    """

    reference: Gaussian
    order: Float[Array, ""] = eqx.field(converter=lambda value: _order("Renyi", value))
    name: ClassVar[str] = "Rényi"
    convexity: ClassVar[str] = "convex for α ≤ 1"

    def __check_init__(self) -> None:
        _require_gaussian("Renyi", self.reference)

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        _of_particles(self.name)

    def gaussian_value(self, measure: Gaussian, points: Points, batch: PyTree = None) -> Float[Array, ""]:
        return renyi_of_gaussians(measure, self.reference, self.order)

    def words(self, weight: Float[Array, ""]) -> Words:
        formula = f"{number(weight)}·Rényi_{number(self.order)}(Q, Gaussian)"
        return Words(formula, rest=formula)


class AlphaDivergence(AbstractRegulariser):
    """The α-divergence (∫ q^α p^{1−α} − 1)/(α(α − 1)) = (exp((α − 1)·Rényi) − 1)/(α(α − 1)), in closed form
    between Gaussians. As α → 1 it is KL(Q, P), as α → 0 KL(P, Q); α = ½ is 4 times the squared Hellinger
    distance. For `ParametricFlow`: particles have no density.

    Parameters
    ----------
    reference
        P, a `Gaussian`.
    order
        α > 0, not 1.
    """

    reference: Gaussian
    order: Float[Array, ""] = eqx.field(converter=lambda value: _order("AlphaDivergence", value))
    name: ClassVar[str] = "α-divergence"
    convexity: ClassVar[str] = "convex"

    def __check_init__(self) -> None:
        _require_gaussian("AlphaDivergence", self.reference)

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        _of_particles(self.name)

    def gaussian_value(self, measure: Gaussian, points: Points, batch: PyTree = None) -> Float[Array, ""]:
        alpha = self.order
        renyi = renyi_of_gaussians(measure, self.reference, alpha)
        return jnp.expm1((alpha - 1) * renyi) / (alpha * (alpha - 1))

    def words(self, weight: Float[Array, ""]) -> Words:
        formula = f"{number(weight)}·α-divergence_{number(self.order)}(Q, Gaussian)"
        return Words(formula, rest=formula)


def renyi_of_gaussians(q: Gaussian, p: Gaussian, order: Float[Array, ""]) -> Float[Array, ""]:
    """D_α(Q, P), ∞ where it is infinite."""
    if q.full_rank or p.full_rank:
        distance, log_determinant = _of_matrices(q, p, order)
    else:
        distance, log_determinant = _by_coordinate(q, p, order)
    # log|S| = ½ log|Σ|
    logs = log_determinant - 2 * ((1 - order) * q.log_determinant() + order * p.log_determinant())
    found = 0.5 * order * distance - logs / (2 * (order - 1))
    return jnp.where(jnp.isfinite(found), found, jnp.inf)


def _by_coordinate(
    q: Gaussian, p: Gaussian, order: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """‖m_Q − m_P‖²_{Σ⁻¹} and log|Σ|, where Σ is diagonal."""
    mixed = jax.tree.map(
        lambda a, b: order * jnp.square(b) + (1 - order) * jnp.square(a), q.deviations(), p.deviations()
    )
    difference = subtract(q.mean, p.mean)
    distance = total(jax.tree.map(lambda d, s: jnp.square(d) / s, difference, mixed))
    return distance, total(jax.tree.map(jnp.log, mixed))


def _of_matrices(
    q: Gaussian, p: Gaussian, order: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """‖m_Q − m_P‖²_{Σ⁻¹} and log|Σ|."""
    factor = jnp.linalg.cholesky(order * p.covariance() + (1 - order) * q.covariance())
    difference, _ = ravel_pytree(subtract(q.mean, p.mean))
    whitened = solve_triangular(factor, difference, lower=True)
    return jnp.sum(jnp.square(whitened)), 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
