"""Birth and death: particles are copied and killed, so that mass moves without crossing what lies between."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import as_matrix
from measureflow.core.validation import positive_number
from measureflow.flows.flow import AbstractFlow, particle_leaves, rearranged
from measureflow.flows.training import require_carried
from measureflow.spaces.empirical import Empirical
from measureflow.statement.problem import Problem


def _rate(value: Any) -> Float[Array, ""]:
    return positive_number("BirthDeath rate", value, "the step size of the flow keeps both in one time.")


def _bandwidth(value: Any) -> Float[Array, ""] | None:
    if value is None:
        return None
    return positive_number("BirthDeath bandwidth", value, "None chooses it by the number of particles.")


class BirthDeath(AbstractFlow):
    """Another flow, and after each of its steps births and deaths: the Fisher–Rao part of

        ∂q = … − q (δF/δQ − ∫δF/δQ dQ),   δF/δQ = V + ∫W dQ + τ log q̂ + δR/δQ.

    A particle whose δF/δQ is above the mean dies with probability 1 − exp(−rate·excess/τ) and becomes a copy
    of another; one below the mean is copied over another (Lu, Lu and Nolen, 2019). For KL with τ = 1 and no
    motion, q_t ∝ q₀^{exp(−t)} π^{1−exp(−t)}. log q̂ is a Gaussian kernel density estimate in coordinates that
    the particles whiten: good for few dimensions only, and it blurs what is narrower than its bandwidth.

    Parameters
    ----------
    flow
        What moves the particles, such as `WassersteinFlow(1e-2)`: copies have to part again.
    rate
        Time of the Fisher–Rao part per step.
    bandwidth
        Of q̂, in standard deviations of the particles; None is N^{−1/(J+4)}.
    """

    flow: AbstractFlow
    rate: Float[Array, ""] = eqx.field(converter=_rate)
    bandwidth: Float[Array, ""] | None = eqx.field(converter=_bandwidth, default=None)

    def init(self, problem: Problem, initial: Any) -> Any:
        if problem.temperature() is None:
            raise ValueError(
                "BirthDeath was given a problem without temperature: without the entropy's part all "
                "particles would become copies of the best; give the problem a KL term."
            )
        require_carried(self, problem)
        state = self.flow.init(problem, initial)
        if not hasattr(state, "step"):
            raise TypeError(
                f"BirthDeath needs a flow whose states count their steps, got {type(self.flow).__name__}; "
                "give its state a field step."
            )
        return state

    def step(self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""]) -> Any:
        own_key = jax.random.fold_in(jax.random.fold_in(key, state.step), 5)
        moved = self.flow.step(problem, state, batch, key)
        measure = self.flow.measure(moved)
        assert isinstance(measure, Empirical)
        excess = self._excess(problem, measure, batch)
        sources = births_and_deaths(self.rate.astype(excess.dtype) * excess, own_key)
        return rearranged(moved, particle_leaves(self.flow, problem, moved), sources)

    def _excess(self, problem: Problem, measure: Empirical, batch: PyTree) -> Float[Array, " n"]:
        """(δF/δQ − its mean)/τ at each particle."""
        energy = problem.free_energy(batch)
        assert energy.temperature is not None
        rows = as_matrix(measure.particles)
        log_density = log_kernel_density(rows, self.bandwidth)
        found = energy.first_variation(measure) / energy.temperature + log_density
        return found - jnp.mean(found)

    def promises(self, problem: Problem) -> list[str]:
        return [
            *self.flow.promises(problem),
            "Births and deaths move mass between modes that no particle crosses; the density that they need "
            "is estimated, well in few dimensions only, and copies are not independent.",
        ]

    def measure(self, state: Any) -> Any:
        return self.flow.measure(state)

    def finite(self, state: Any) -> Bool[Array, " n"]:
        return self.flow.finite(state)

    def observe(
        self, problem: Problem, state: Any, batch: PyTree, key: Key[Array, ""], sampled_share: float
    ) -> dict[str, Float[Array, ""]]:
        return self.flow.observe(problem, state, batch, key, sampled_share)

    def require_share(self, sampled_share: float) -> None:
        self.flow.require_share(sampled_share)

    def on(self, mesh: Mesh) -> "BirthDeath":
        return BirthDeath(self.flow.on(mesh), self.rate, self.bandwidth)

    def tabulated(self, first: int, used: int, length: int) -> "BirthDeath":
        return BirthDeath(self.flow.tabulated(first, used, length), self.rate, self.bandwidth)


def log_kernel_density(rows: Float[Array, "n J"], bandwidth: Float[Array, ""] | None) -> Float[Array, " n"]:
    """log q̂ at the particles, up to a constant: Gaussians with the particles' covariance times h²."""
    n, number = rows.shape
    width = jnp.asarray(n ** (-1 / (number + 4))) if bandwidth is None else bandwidth
    centred = rows - jnp.mean(rows, axis=0, keepdims=True)
    covariance = jnp.matmul(centred.T, centred, precision=jax.lax.Precision.HIGHEST) / n
    ridge = 1e-6 * jnp.trace(covariance) / number + 1e-12
    factor = jnp.linalg.cholesky(covariance + ridge * jnp.eye(number, dtype=rows.dtype))
    z = jax.scipy.linalg.solve_triangular(factor, centred.T, lower=True).T / width.astype(rows.dtype)

    def at(point: Float[Array, " J"]) -> Float[Array, ""]:
        return jax.nn.logsumexp(-0.5 * jnp.sum(jnp.square(z - point[None]), axis=1))

    return jax.lax.map(at, z, batch_size=128)


def births_and_deaths(excess: Float[Array, " n"], key: Key[Array, ""]) -> Int[Array, " n"]:
    """Of which particle each becomes a copy: those above the mean die with probability 1 − exp(−excess) and
    copy any other; those below are copied over any other with probability 1 − exp(excess)."""
    n = excess.shape[0]
    event_key, other_key = jax.random.split(key)
    happens = jax.random.uniform(event_key, (n,), excess.dtype) < -jnp.expm1(-jnp.abs(excess))
    others = jax.random.randint(other_key, (n,), 0, n)
    itself = jnp.arange(n, dtype=others.dtype)
    dies = happens & (excess > 0)
    sources = jnp.where(dies, others, itself)
    # A birth replaces `others[i]` by i; the index n is nowhere.
    replaced = jnp.where(happens & (excess < 0), others, n)
    return sources.at[replaced].set(itself, mode="drop")
