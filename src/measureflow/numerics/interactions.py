"""How (1/N) Σⱼ ∇₁κ(θᵢ, θⱼ), the interaction of particle i with all others, is summed.

Exactly, in tiles whose memory is O(N); or by an unbiased estimate of O(N) operations: random batches of
particles, or random features of the kernel.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from measureflow.core.noise import standard_normal
from measureflow.core.permutations import permuted
from measureflow.core.pytrees import (
    OtherParticles,
    Particles,
    add,
    centred,
    inner_products,
    particle_count,
    scale,
)
from measureflow.core.validation import require_count
from measureflow.numerics.pair_sums import in_tiles, own_gradient_sum, value_sum, well_conditioned
from measureflow.spaces.kernels import AbstractKernel, AbstractRadialKernel, KernelCombination, PullBack

#: Σⱼ h(θᵢ, θ′ⱼ) for every row i of a tile: a function of rows θ and others θ′.
TileSum: TypeAlias = Callable[[Any, Any], PyTree]


class AbstractInteractions(eqx.Module):
    """A way to sum the interactions of particles. Sums and pull-backs of kernels are taken apart here,
    the same way for all; a subclass sees kernels that are neither."""

    @abc.abstractmethod
    def simple_gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Particles:
        """(1/N) Σⱼ ∇₁κ(θᵢ, θⱼ) for every i, or an unbiased estimate that `key` makes."""

    @abc.abstractmethod
    def simple_mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Float[Array, ""]:
        """(1/N²) Σᵢⱼ κ(θᵢ, θⱼ), the diagonal included, or an unbiased estimate."""

    def mean_over_pairs(
        self, summed: TileSum, particles: Particles, key: Key[Array, ""] | None = None
    ) -> PyTree[Float[Array, "n ..."]]:
        """(1/N) Σⱼ h(θᵢ, θⱼ) for every i and any h, or an unbiased estimate that `key` makes.

        Parameters
        ----------
        summed
            Σⱼ h(θᵢ, θ′ⱼ) for every i, a function of the rows θ and the others θ′ of a tile of pairs.
        particles
            θ, or any pytree with a row for each particle, such as particles and their forces.
        key
            For estimates.
        """
        raise TypeError(
            f"interactions={self} cannot sum any function of pairs; use mf.ExactInteractions(), or "
            "mf.RandomBatches(size)."
        )

    def gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Particles:
        """(1/N) Σⱼ ∇₁κ(θᵢ, θⱼ) for every i: the force that the particles feel from each other.

        Of features f, ∇₁κ_f(θ, θ′) = Df(θ)ᵀ ∇₁κ(f(θ), f(θ′)): N features and one vector-Jacobian product
        each.
        """
        if isinstance(kernel, PullBack):
            features, pull_back = jax.vjp(jax.vmap(kernel.features), particles)
            return pull_back(self.gradient(kernel.kernel, features, key))[0]
        if isinstance(kernel, KernelCombination):
            # Every term with the same key: each is unbiased, and so is their sum.
            terms = zip(kernel.weights, kernel.kernels, strict=True)
            return functools.reduce(
                add, [scale(weight, self.gradient(term, particles, key)) for weight, term in terms]
            )
        return self.simple_gradient(kernel, particles, key)

    def mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        """(1/N²) Σᵢⱼ κ(θᵢ, θⱼ), the diagonal included: ∬ κ dQ dQ of the empirical measure."""
        if isinstance(kernel, PullBack):
            return self.mean(kernel.kernel, jax.vmap(kernel.features)(particles), key)
        if isinstance(kernel, KernelCombination):
            means = [self.mean(term, particles, key) for term in kernel.kernels]
            return jnp.sum(jnp.stack(kernel.weights) * jnp.stack(means))
        return self.simple_mean(kernel, particles, key)


class ExactInteractions(AbstractInteractions):
    """All N² pairs, a tile of them at a time: N² numbers never exist at once. Few particles are one tile."""

    def simple_gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Particles:
        summed = own_gradient_sum(kernel, particles)
        return jax.tree.map(lambda leaf: leaf / particle_count(particles), summed)

    def simple_mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        conditioned = well_conditioned(kernel, particles)
        return jnp.mean(value_sum(kernel, conditioned, conditioned)) / particle_count(particles)

    def mean_over_pairs(
        self, summed: TileSum, particles: Particles, key: Key[Array, ""] | None = None
    ) -> PyTree[Float[Array, "n ..."]]:
        found = in_tiles(summed, particles, particles)
        return jax.tree.map(lambda leaf: leaf / particle_count(particles), found)


def _batch_size(value: Any) -> int:
    return require_count("RandomBatches size", value, 2, "particles of a batch interact with each other.")


class RandomBatches(AbstractInteractions):
    """At every step the particles are dealt into batches of `size` p, and interact within their batch, with
    the weight that makes this unbiased (Jin, Li and Liu, 2020):

        ((N − 1)/N) · (1/(p − 1)) Σ_{j ≠ i in the batch} ∇₁κ(θᵢ, θⱼ) + (1/N) ∇₁κ(θᵢ, θᵢ)

    O(Np) kernel values instead of O(N²). The standard deviation of the force on one particle is about that
    of one pair's over √p.

    Parameters
    ----------
    size
        p, at least 2; it divides the number of particles.
    """

    size: int = eqx.field(converter=_batch_size, static=True)

    def simple_gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Particles:
        n, p = particle_count(particles), self.size
        order = self._order(n, key)
        forces = jax.vmap(lambda batch: EXACT.simple_gradient(kernel, batch))(self._dealt(particles, order))
        weight = (n - 1) / n * p / (p - 1)
        forces = jax.tree.map(lambda leaf, to: weight * leaf.reshape(to.shape), forces, particles)
        forces = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[order].set(leaf), forces)
        if isinstance(kernel, AbstractRadialKernel):
            return forces
        # The batch's sum counts a particle's force on itself too often; for a radial kernel it is 0.
        own = jax.vmap(lambda theta: jax.grad(kernel)(theta, theta))(particles)
        return jax.tree.map(lambda force, self_: force + (1 / n - weight / p) * self_, forces, own)

    def simple_mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Float[Array, ""]:
        n, p = particle_count(particles), self.size
        batches = self._dealt(particles, self._order(n, key))
        within = jnp.mean(jax.vmap(lambda batch: EXACT.simple_mean(kernel, batch))(batches))
        own = jnp.mean(jax.vmap(lambda theta: kernel(theta, theta))(particles))
        return (n - 1) / n * (p * within - own) / (p - 1) + own / n

    def mean_over_pairs(
        self, summed: TileSum, particles: Particles, key: Key[Array, ""] | None = None
    ) -> PyTree[Float[Array, "n ..."]]:
        n, p = particle_count(particles), self.size
        order = self._order(n, key)
        found = jax.vmap(lambda batch: summed(batch, batch))(self._dealt(particles, order))
        found = jax.tree.map(lambda leaf: leaf.reshape(n, *leaf.shape[2:]), found)
        found = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[order].set(leaf), found)
        alone = jax.tree.map(lambda leaf: leaf[:, None], particles)
        own = jax.tree.map(lambda leaf: leaf[:, 0], jax.vmap(lambda one: summed(one, one))(alone))
        share = (n - 1) / n / (p - 1)
        return jax.tree.map(lambda all_, self_: share * (all_ - self_) + self_ / n, found, own)

    def _order(self, n: int, key: Key[Array, ""] | None) -> Int[Array, " n"]:
        if n % self.size:
            raise ValueError(
                f"RandomBatches size must divide the number of particles, got size={self.size} for {n} "
                f"particles; choose a size that divides {n}."
            )
        return permuted(jnp.arange(n), n, _required(key))

    def _dealt(self, particles: Particles, order: Int[Array, " n"]) -> PyTree[Float[Array, "b p ..."]]:
        return jax.tree.map(lambda leaf: leaf[order].reshape(-1, self.size, *leaf.shape[1:]), particles)


def _feature_count(value: Any) -> int:
    return require_count("RandomFeatures count", value, 1, "100 is a start.")


class RandomFeatures(AbstractInteractions):
    """κ(x, y) = E cos(ω·(x − y)) for a random frequency ω (Rahimi and Recht, 2007), so with `count` M fresh
    frequencies at every step

        −(1/M) Σₘ ωₘ (sin(ωₘ·θᵢ) Cₘ − cos(ωₘ·θᵢ) Sₘ),   Cₘ + i Sₘ = (1/N) Σⱼ exp(i ωₘ·θⱼ)

    is unbiased, for radial kernels. O(NM) operations; between devices only the 2M means are exchanged. The
    standard deviation of the force on one particle is about √(J/M) in units of the inverse lengthscale.

    Parameters
    ----------
    count
        M, the number of frequencies.
    """

    count: int = eqx.field(converter=_feature_count, static=True)

    def simple_gradient(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Particles:
        frequencies, phases = self._phases(kernel, particles, key)
        sine, cosine = jnp.sin(phases), jnp.cos(phases)
        mixed = cosine * jnp.mean(sine, axis=0, keepdims=True)
        mixed = mixed - sine * jnp.mean(cosine, axis=0, keepdims=True)
        mixed = _at_zero(kernel) / self.count * mixed

        def on_leaf(leaf: Array) -> Array:
            matrix = leaf.reshape(self.count, -1)
            product = jnp.matmul(mixed, matrix, precision=jax.lax.Precision.HIGHEST)
            return product.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype)

        return jax.tree.map(on_leaf, frequencies)

    def simple_mean(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> Float[Array, ""]:
        _, phases = self._phases(kernel, particles, key)
        squares = jnp.square(jnp.mean(jnp.sin(phases), axis=0)) + jnp.square(
            jnp.mean(jnp.cos(phases), axis=0)
        )
        return _at_zero(kernel) * jnp.mean(squares)

    def _phases(
        self, kernel: AbstractKernel, particles: Particles, key: Key[Array, ""] | None
    ) -> tuple[OtherParticles, Float[Array, "n m"]]:
        """ωₘ, and ωₘ·θᵢ. Differences do not see the mean; without it phases are small."""
        if not isinstance(kernel, AbstractRadialKernel):
            raise TypeError(
                f"RandomFeatures needs a radial kernel, got {type(kernel).__name__}; use "
                "mf.RandomBatches(size), or mf.ExactInteractions()."
            )
        of_precisions, of_directions = jax.random.split(_required(key))
        one = jax.tree.map(lambda leaf: leaf[0], particles)
        directions = standard_normal(of_directions, self.count, one)
        sizes = jnp.sqrt(kernel.precisions(of_precisions, self.count))
        frequencies = jax.vmap(scale)(sizes, directions)
        return frequencies, inner_products(centred(particles), frequencies)


#: What a statement means by a sum over pairs.
EXACT = ExactInteractions()


def _at_zero(kernel: AbstractKernel) -> Float[Array, ""]:
    assert isinstance(kernel, AbstractRadialKernel)
    return kernel.profile(jnp.zeros(()))


def _required(key: Key[Array, ""] | None) -> Key[Array, ""]:
    if key is None:
        raise ValueError("random interactions need a key, got None; pass key=jax.random.key(0).")
    return key
