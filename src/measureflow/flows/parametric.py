"""FD-GVI: the same problem with Q restricted to a parametric family, by gradient descent on ν ↦ L(Q_ν)."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, as_matrix, particle_count, squared_norm
from measureflow.core.showing import one_line
from measureflow.core.validation import require_count, require_particles
from measureflow.flows.flow import AbstractFlow, in_files, optimiser_step, require_optimiser
from measureflow.numerics.integration import draws
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure, Gaussian
from measureflow.spaces.mixtures import GaussianMixture
from measureflow.statement.problem import Problem, value_parts


class AbstractFamily(eqx.Module):
    """A family of Gaussians Q_ν, or of mixtures of them, and its unconstrained parameters ν."""

    #: What its members are.
    measures: ClassVar[type] = Gaussian

    @abc.abstractmethod
    def parameters(self, initial: Any) -> PyTree:
        """ν of the member nearest to `initial`."""

    @abc.abstractmethod
    def member(self, parameters: PyTree) -> Any:
        """Q_ν."""

    @abc.abstractmethod
    def moment_matched(self, particles: Empirical) -> Any:
        """The Gaussian with the moments of the particles that the family can hold."""


class MeanFieldGaussian(AbstractFamily):
    """N(m, diag(exp(β))²): independent coordinates, ν = (m, β) with β the log standard deviations."""

    def parameters(self, initial: Gaussian) -> tuple[Parameters, Parameters]:
        return initial.mean, jax.tree.map(jnp.log, initial.deviations())

    def member(self, parameters: tuple[Parameters, Parameters]) -> Gaussian:
        mean, log_scale = parameters
        return Gaussian(mean, jax.tree.map(jnp.exp, log_scale))

    def moment_matched(self, particles: Empirical) -> Gaussian:
        return particles.moment_matched()


class FullRankGaussian(AbstractFamily):
    """N(m, LLᵀ): any covariance, ν = (m, A), L the lower triangle of A with its diagonal exponentiated."""

    def parameters(self, initial: Gaussian) -> tuple[Parameters, Float[Array, "J J"]]:
        factor = initial.factor()
        return initial.mean, jnp.tril(factor, -1) + jnp.diag(jnp.log(jnp.diagonal(factor)))

    def member(self, parameters: tuple[Parameters, Float[Array, "J J"]]) -> Gaussian:
        mean, raw = parameters
        return Gaussian(mean, jnp.tril(raw, -1) + jnp.diag(jnp.exp(jnp.diagonal(raw))))

    def moment_matched(self, particles: Empirical) -> Gaussian:
        mean = particles.moment_matched().mean
        rows = as_matrix(particles.particles)
        covariance = jnp.atleast_2d(jnp.cov(rows, rowvar=False, bias=True))
        return Gaussian(mean, jnp.linalg.cholesky(covariance))


def moment_matched(family: AbstractFamily, particles: Particles) -> Any:
    """The Gaussian of the family with the moments of the particles."""
    try:
        return family.moment_matched(Empirical(particles))
    except ValueError:
        raise ValueError(
            f"initial holds {particle_count(particles)} particles whose moments do not define a "
            f"Gaussian of the family {type(family).__name__}: some direction has no spread; pass "
            "more particles, or a Gaussian."
        ) from None


@in_files
class ParametricState(eqx.Module):
    """The state of a `ParametricFlow`.

    Parameters
    ----------
    parameters
        ν.
    step
        The number of steps taken.
    memory
        What the optimiser remembers.
    """

    parameters: PyTree
    step: Int[Array, ""]
    memory: PyTree

    def __repr__(self) -> str:
        return one_line(self)


class ParametricFlow(AbstractFlow):
    """Descends ν ↦ L(Q_ν) = E[ℓ(θ)] + Σ w D(Q_ν, P), θ = m + L z reparametrised by z ~ N(0, I).

    KL to a Gaussian or flat reference, and MMD² of a squared exponential kernel to a Gaussian, are exact. All
    else is a sum over draws: unbiased for a loss, but a nonlinear functional such as the log score is that of
    the draws' mixture, biased by O(1/samples).

    Parameters
    ----------
    family
        `MeanFieldGaussian()`, `FullRankGaussian()`, `LowRankGaussian(rank)` or
        `MixtureOfGaussians(components)`.
    optimiser
        Any Optax optimiser.
    samples
        The number of draws per step.
    """

    family: AbstractFamily
    optimiser: optax.GradientTransformation
    samples: int = eqx.field(static=True, default=200)
    movers: ClassVar[str] = "sets of parameters"
    remedy: ClassVar[str] = "a smaller learning rate of the optimiser, or more samples"

    def __check_init__(self) -> None:
        if not isinstance(self.family, AbstractFamily):
            raise TypeError(
                f"family must be a Gaussian family, got {self.family!r}; see MeanFieldGaussian()."
            )
        require_optimiser(self.optimiser)
        require_count("ParametricFlow samples", self.samples, 2, "200 is a start.")

    def init(self, problem: Problem, initial: Any) -> ParametricState:
        wanted = self.family.measures
        if isinstance(initial, AbstractMeasure) and not isinstance(initial, Empirical | wanted):
            raise TypeError(
                f"initial must be particles or a {wanted.__name__}, got {initial!r}; for "
                f"{type(self.family).__name__} pass initial.sample(key, n)."
            )
        if not isinstance(initial, wanted):
            particles = require_particles("initial", initial, problem.template())
            initial = moment_matched(self.family, particles)
        point = jax.tree.map(lambda leaf: leaf[None], initial.template())
        require_particles("initial", point, problem.template())
        parameters = self.family.parameters(initial)
        return ParametricState(parameters, jnp.zeros((), jnp.int32), self.optimiser.init(parameters))

    def finite(self, state: ParametricState) -> Bool[Array, "1"]:
        leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state.parameters)]
        return jnp.all(jnp.stack(leaves))[None]

    def objective_parts(
        self, parameters: PyTree, problem: Problem, batch: PyTree, key: Key[Array, ""]
    ) -> dict[str, Float[Array, ""]]:
        """An unbiased estimate of the summands of L(Q_ν)."""
        member = self.family.member(parameters)
        if isinstance(member, GaussianMixture):
            return _mixture_parts(problem, member, key, self.samples, batch)
        return value_parts(problem, member, draws(member, key, self.samples), batch)

    def _objective(self, *arguments: Any) -> Float[Array, ""]:
        return sum(self.objective_parts(*arguments).values(), start=jnp.zeros(()))

    def step(
        self, problem: Problem, state: ParametricState, batch: PyTree, key: Key[Array, ""]
    ) -> ParametricState:
        step_key = jax.random.fold_in(key, state.step)
        gradient = jax.grad(self._objective)(state.parameters, problem, batch, step_key)
        parameters, memory = optimiser_step(self.optimiser, gradient, state.memory, state.parameters)
        return ParametricState(parameters, state.step + 1, memory)

    def promises(self, problem: Problem) -> list[str]:
        return [
            f"It finds a local minimum of L among what {self.family} can be, and not q*, unless that is one "
            "of these."
        ]

    def measure(self, state: ParametricState) -> Any:
        return self.family.member(state.parameters)

    def observe(
        self,
        problem: Problem,
        state: ParametricState,
        batch: PyTree,
        key: Key[Array, ""],
        sampled_share: float,
    ) -> dict[str, Float[Array, ""]]:
        """The estimated summands of L(Q_ν), their sum `value`, and the norm of the gradient in ν."""
        step_key = jax.random.fold_in(key, state.step)
        parts = self.objective_parts(state.parameters, problem, batch, step_key)
        gradient = jax.grad(self._objective)(state.parameters, problem, batch, step_key)
        total = sum(parts.values(), start=jnp.zeros(()))
        return {**parts, "value": total, "gradient_norm": jnp.sqrt(squared_norm(gradient))}


def _mixture_parts(
    problem: Problem, member: GaussianMixture, key: Key[Array, ""], samples: int, batch: PyTree
) -> dict[str, Float[Array, ""]]:
    """F(Q) = ∫V dQ + ½∬W dQdQ + R(Q), and τ∫log q dQ, by as many draws from every component: L(Q) up to a
    constant. There is no closed form of a mixture's entropy."""
    energy = problem.free_energy(batch)
    points = member.strata(key, max(samples // len(member.weights), 1))
    masses, total = points.masses(), jnp.zeros(())
    if energy.potential is not None:
        total += points.integrate(energy.potential)
    if energy.interaction is not None:
        kernel = energy.interaction
        against = jax.vmap(lambda x: points.integrate(lambda y: kernel(x, y)))(points.particles)
        total += 0.5 * jnp.sum(masses * against)
    if energy.rest is not None:
        total += energy.rest(points)
    parts = {"energy": total}
    if energy.temperature is not None:
        parts["entropy"] = energy.temperature * points.integrate(member.log_density)
    return parts
