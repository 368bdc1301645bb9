"""The covariance of the particles as preconditioner: an ensemble knows its posterior while it runs."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from measureflow.core.pytrees import Particles, as_matrix, is_concrete, particle_dimension
from measureflow.core.validation import require_count
from measureflow.flows.preconditioners import AbstractPreconditioner
from measureflow.flows.scalings import AbstractScaling, Dense, LowRank

_EXACT = jax.lax.Precision.HIGHEST
# Up to so many dimensions the covariance is a matrix; beyond, a diagonal and a few directions.
MOST_DENSE = 500
_RANK = 64
# With fewer particles than so many for each dimension, the covariance is shrunk towards its diagonal.
_PLENTY = 5


class Covariance(NamedTuple):
    """A root of the covariance: a matrix L, or deviations, directions and excess variances (`LowRank`)."""

    factor: Float[Array, "J K"]
    deviations: Float[Array, " J"]
    excess: Float[Array, " K"]

    def scaling(self) -> AbstractScaling:
        """g = the covariance."""
        if self.factor.shape[0] <= MOST_DENSE:
            return Dense(self.factor)
        return LowRank(self.deviations, self.factor, self.excess)


def _adapt_steps(value: Any) -> Int[Array, ""]:
    if is_concrete(value):
        value = require_count("EnsemblePreconditioner adapt_steps", value, 1, "it freezes after them.")
    return jnp.asarray(value, jnp.int32)


class EnsemblePreconditioner(AbstractPreconditioner):
    """g = the covariance of the particles: in its coordinates a Gaussian posterior has condition number 1.

    It is that of the particles every `every` steps while step < `adapt_steps`, and then stands still; nothing
    before that is a draw of q*. Particles that are far from all others do not count. With many particles for
    every dimension (N ≥ 5J) the flow is affine-equivariant: on Aθ + b it takes the same path, up to rounding.
    With fewer, the covariance is shrunk towards its diagonal (Ledoit and Wolf, 2004; Schäfer and Strimmer,
    2005); in more than 500 dimensions it is the diagonal and the directions that stand out from it.
    """

    adapt_steps: Int[Array, ""] = eqx.field(converter=_adapt_steps)
    every: int = eqx.field(static=True, default=10)
    adaptive: ClassVar[bool] = True

    def __check_init__(self) -> None:
        require_count("EnsemblePreconditioner every", self.every, 1, "10 is a start.")

    def init(self, particles: Particles) -> Covariance:
        return ensemble_covariance(as_matrix(particles))

    def update(
        self, memory: Covariance, particles: Particles, gradient: Particles, step: Int[Array, ""]
    ) -> Covariance:
        due = (step < self.adapt_steps) & (step % self.every == 0)
        return jax.lax.cond(
            due, lambda: ensemble_covariance(as_matrix(particles)), lambda: Covariance(*memory)
        )

    def scaling(self, memory: Covariance, step: Int[Array, ""]) -> AbstractScaling:
        return Covariance(*memory).scaling()


@eqx.filter_jit
def ensemble_covariance(rows: Float[Array, "n J"]) -> Covariance:
    """A root of the covariance of those rows that are not far from all others."""
    if rows.shape[0] < 2:
        raise ValueError(
            "an ensemble of one particle has no covariance; use several, or mf.FixedPreconditioner(scale)."
        )
    kept = near_others(rows)
    weights = kept.astype(rows.dtype) / jnp.sum(kept.astype(rows.dtype))
    # Summed in a frame near the particles, or single precision loses what they differ by.
    rows = jnp.where(kept[:, None], rows, jnp.nanmedian(rows, axis=0)[None])
    centre = jnp.sum(weights[:, None] * rows, axis=0)
    centred = jnp.sqrt(weights)[:, None] * (rows - centre[None])
    deviations = jnp.sqrt(jnp.sum(jnp.square(centred), axis=0))
    # What does not vary yet must not stand still for ever.
    size = jnp.max(jnp.abs(rows), axis=0)
    deviations = jnp.maximum(deviations, 1e-6 * size + 1e-12)
    if particle_dimension(rows) > MOST_DENSE:
        return _low_rank(centred / deviations[None], deviations)
    factor = _shrunk(centred / deviations[None]) if rows.shape[0] < _PLENTY * rows.shape[1] else None
    if factor is not None:
        return Covariance(deviations[:, None] * factor, deviations, jnp.zeros(rows.shape[1], rows.dtype))
    return Covariance(_equivariant(centred, deviations), deviations, jnp.zeros(rows.shape[1], rows.dtype))


def near_others(rows: Float[Array, "n J"]) -> Bool[Array, " n"]:
    """Which rows are finite, and not more than 30 robust standard deviations from the median in a
    coordinate."""
    finite = jnp.all(jnp.isfinite(rows), axis=1)
    rows = jnp.where(finite[:, None], rows, 0.0)
    away = jnp.abs(rows - jnp.median(rows, axis=0)[None])
    spread = 1.4826 * jnp.median(away, axis=0)
    # Where half of the particles agree there is no spread to measure by.
    far = jnp.any((away > 30 * spread[None]) & (spread[None] > 0), axis=1)
    return finite & ~far


def _equivariant(centred: Float[Array, "n J"], deviations: Float[Array, " J"]) -> Float[Array, "J J"]:
    """L with L Lᵀ = the covariance C = XᵀX, such that A C Aᵀ has the root A L for every A.

    A Cholesky factor is not: so it is taken in coordinates that the particles themselves span. X = S M, with
    S fixed sums of particles, C = S (M Mᵀ) Sᵀ; each pass mends the rounding of the one before.
    """
    n, number = centred.shape
    signs = jax.random.rademacher(jax.random.key(0), (n, number), centred.dtype)
    factor = jnp.matmul(centred.T, signs, precision=_EXACT) / jnp.sqrt(jnp.asarray(float(number)))
    for _ in range(3):
        # Rows in units of their deviations: the same z, better conditioned.
        z = jnp.linalg.solve(factor / deviations[:, None], (centred / deviations[None]).T)
        moments = jnp.matmul(z, z.T, precision=_EXACT)
        ridge = 4 * number * jnp.finfo(moments.dtype).eps * jnp.trace(moments) / number
        root = jnp.linalg.cholesky(moments + ridge * jnp.eye(number, dtype=moments.dtype))
        factor = jnp.matmul(factor, root, precision=_EXACT)
    # Too few different particles for a covariance: the diagonal is better than nothing.
    return jnp.where(jnp.all(jnp.isfinite(factor)), factor, jnp.diag(deviations))


def _shrunk(standard: Float[Array, "n J"]) -> Float[Array, "J J"]:
    """A root of the correlations, shrunk by λ = Σ Var(r)/Σ r² over pairs (Schäfer and Strimmer, 2005)."""
    n, number = standard.shape
    correlations = jnp.matmul(standard.T, standard, precision=_EXACT)
    squares = jnp.matmul(jnp.square(standard).T, jnp.square(standard), precision=_EXACT)
    variances = squares - jnp.square(correlations) / n
    off = 1 - jnp.eye(number, dtype=standard.dtype)
    share = jnp.sum(off * variances) / jnp.maximum(jnp.sum(off * jnp.square(correlations)), 1e-12)
    share = jnp.clip(share, 1e-3, 1.0)
    shrunk = jnp.where(off > 0, (1 - share) * correlations, 1.0)
    root = jnp.linalg.cholesky(shrunk)
    return jnp.where(jnp.all(jnp.isfinite(root)), root, jnp.eye(number, dtype=root.dtype))


def _low_rank(standard: Float[Array, "n J"], deviations: Float[Array, " J"]) -> Covariance:
    """The directions whose variance stands out from what chance makes of none: beyond (1 + √(J/n))²."""
    n, number = standard.shape
    rank = min(_RANK, n - 1)
    values, vectors = jnp.linalg.eigh(jnp.matmul(standard, standard.T, precision=_EXACT))
    values, vectors = values[-rank:], vectors[:, -rank:]
    edge = (1 + (number / n) ** 0.5) ** 2
    excess = jnp.maximum(values - edge, 0.0)
    directions = jnp.matmul(standard.T, vectors, precision=_EXACT)
    directions = directions / jnp.sqrt(jnp.maximum(values, 1e-12))[None]
    return Covariance(directions, deviations, excess)
