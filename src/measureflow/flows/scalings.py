"""How a preconditioner g acts: on drifts as g, on noise as a root of it."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters, Particles, as_matrix, like_rows

_EXACT = jax.lax.Precision.HIGHEST


class AbstractScaling(eqx.Module):
    """g = L Lᵀ, applied to every particle's vector."""

    @abc.abstractmethod
    def root(self, vectors: Particles) -> Particles:
        """L x."""

    @abc.abstractmethod
    def root_transposed(self, vectors: Particles) -> Particles:
        """Lᵀ x."""

    @abc.abstractmethod
    def root_inverse(self, vectors: Particles) -> Particles:
        """L⁻¹ x."""

    def times(self, vectors: Particles) -> Particles:
        """g x = L Lᵀ x."""
        return self.root(self.root_transposed(vectors))


class Identity(AbstractScaling):
    """g = 1."""

    def root(self, vectors: Particles) -> Particles:
        return vectors

    def root_transposed(self, vectors: Particles) -> Particles:
        return vectors

    def root_inverse(self, vectors: Particles) -> Particles:
        return vectors


class Diagonal(AbstractScaling):
    """g, one number per coordinate of θ; leaves may be scalars."""

    diagonal: Parameters

    def like(self, vectors: Particles) -> PyTree[Float[Array, "1 ..."]]:
        """g against particles: one leading axis more, scalars spread out."""
        return jax.tree.map(
            lambda g, x: jnp.broadcast_to(g.astype(x.dtype), x.shape[1:])[None], self.diagonal, vectors
        )

    def root(self, vectors: Particles) -> Particles:
        return jax.tree.map(lambda g, x: jnp.sqrt(g) * x, self.like(vectors), vectors)

    def root_transposed(self, vectors: Particles) -> Particles:
        return self.root(vectors)

    def root_inverse(self, vectors: Particles) -> Particles:
        return jax.tree.map(lambda g, x: x / jnp.sqrt(g), self.like(vectors), vectors)

    def times(self, vectors: Particles) -> Particles:
        return jax.tree.map(jnp.multiply, self.like(vectors), vectors)


class Dense(AbstractScaling):
    """g = L Lᵀ, L a matrix over the ravelled θ."""

    factor: Float[Array, "J J"]

    def root(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: jnp.matmul(x, self.factor.T, precision=_EXACT), vectors)

    def root_transposed(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: jnp.matmul(x, self.factor, precision=_EXACT), vectors)

    def root_inverse(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: jnp.linalg.solve(self.factor, x.T).T, vectors)


class LowRank(AbstractScaling):
    """L = D^½ (I + U diag(√(1 + s) − 1) Uᵀ), so that g = D^½ (I + U diag(s) Uᵀ) D^½; U has orthonormal
    columns."""

    deviations: Float[Array, " J"]
    directions: Float[Array, "J rank"]
    excess: Float[Array, " rank"]

    def root(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: self.deviations[None] * self._stretched(x), vectors)

    def root_transposed(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: self._stretched(self.deviations[None] * x), vectors)

    def root_inverse(self, vectors: Particles) -> Particles:
        return _by_rows(lambda x: self._stretched(x / self.deviations[None], -0.5), vectors)

    def _stretched(self, rows: Float[Array, "n J"], power: float = 0.5) -> Float[Array, "n J"]:
        """(I + U diag(s) Uᵀ)^power x."""
        parts = jnp.matmul(rows, self.directions, precision=_EXACT)
        stretch = ((1 + self.excess) ** power - 1)[None]
        return rows + jnp.matmul(stretch * parts, self.directions.T, precision=_EXACT)


def _by_rows(function: Callable[[Array], Array], vectors: Particles) -> Particles:
    return like_rows(function(as_matrix(vectors)), vectors)
