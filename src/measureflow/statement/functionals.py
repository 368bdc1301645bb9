"""Functionals G(Q): what a problem is a weighted sum of."""

import abc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters, particle_count, strong
from measureflow.core.showing import one_line, or_fields
from measureflow.core.validation import positive_number
from measureflow.numerics.integration import Points
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import AbstractMeasure, Gaussian
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.words import Words, number


class AbstractFunctional(eqx.Module):
    """G(Q), a term of a problem. Functionals add, and multiply by weights > 0.

    `value` is all that a term needs: for Q = Σᵢ wᵢ δ(θᵢ) its first variation is ∂G/∂wᵢ and its Wasserstein
    gradient (1/wᵢ) ∂G/∂θᵢ, which JAX derives. So `value` must use the weights: `measure.integrate(f)` is
    ∫ f dQ, `measure.masses()` are the weights.
    """

    # NumPy scalars on the left must leave the multiplication to us.
    __array_ufunc__: ClassVar[None] = None
    #: What it is called in errors, in `value_parts` and by `describe`; by default the name of the class.
    name: ClassVar[str] = ""
    #: "linear", "convex", "strictly convex" or "not known".
    convexity: ClassVar[str] = "not known"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __repr__(self) -> str:
        return one_line(self)

    @abc.abstractmethod
    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        """G(Q) of a weighted empirical measure; a mean over the cases of the batch, where it has data.

        Parameters
        ----------
        measure
            Q = Σᵢ wᵢ δ(θᵢ): use `measure.integrate(f)` or `measure.masses()`, so that the value depends
            on the weights.
        batch
            The data of this step; None where there is none.
        """

    def gaussian_value(self, measure: Gaussian, points: Points, batch: PyTree = None) -> Float[Array, ""]:
        """G(Q) of a Gaussian: in closed form where there is one, else at the points of a finite sum."""
        return evaluated(self, points.measure, batch)

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        """Its normal form (V, W, τ, rest), up to a constant that does not depend on Q."""
        return FreeEnergy(rest=OnBatch(self, batch))

    def constant(self, batch: PyTree = None) -> Float[Array, ""]:
        """The constant that its normal form leaves out."""
        return jnp.zeros(())

    def template(self) -> Parameters | None:
        """A point shaped as the functional says θ is; None where it leaves that open."""
        return None

    def references(self) -> tuple[AbstractMeasure, ...]:
        """The measures P that it compares Q with."""
        return ()

    def terms(self) -> "tuple[tuple[Float[Array, ''], AbstractFunctional], ...]":
        """The weighted functionals it is the sum of."""
        return ((strong(1.0), self),)

    def words(self, weight: Float[Array, ""]) -> Words:
        """What `describe` says of it."""
        formula = f"{number(weight)}·{self.name}(Q)"
        return Words(formula, rest=formula)

    def __add__(self, other: "AbstractFunctional") -> "Sum":
        if not isinstance(other, AbstractFunctional):
            raise TypeError(
                f"only functionals can be added to {self.name}, got {other!r}; for example mf.KL(prior), "
                "or mf.ExpectedLoss(loss) for ∫ ℓ dQ."
            )
        return Sum(*self.terms(), *other.terms())

    def __rmul__(self, weight: Any) -> "Sum":
        names = " + ".join(functional.name for _, functional in self.terms())
        factor = positive_number(f"{names} weight", weight, f"to leave {names} out, drop the term.")
        return Sum(*[(factor * w, functional) for w, functional in self.terms()])

    __mul__ = __rmul__


class Sum(AbstractFunctional):
    """Σₖ wₖ Gₖ(Q)."""

    weights: tuple[Float[Array, ""], ...]
    functionals: tuple[AbstractFunctional, ...]

    def __init__(self, *terms: tuple[Float[Array, ""], AbstractFunctional]):
        self.weights, self.functionals = zip(*terms, strict=True)

    @or_fields
    def __repr__(self) -> str:
        return " + ".join(functional.words(weight).formula for weight, functional in self.terms())

    def terms(self) -> tuple[tuple[Float[Array, ""], AbstractFunctional], ...]:
        return tuple(zip(self.weights, self.functionals, strict=True))

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        values = [weight * evaluated(term, measure, batch) for weight, term in self.terms()]
        return sum(values[1:], start=values[0])

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        energies = [weight * term.free_energy(batch) for weight, term in self.terms()]
        return sum(energies[1:], start=energies[0])


class OnBatch(eqx.Module):
    """Q ↦ G(Q, batch); raises if G does not depend on the weights of Q."""

    functional: AbstractFunctional
    batch: PyTree

    def __call__(self, measure: Empirical) -> Float[Array, ""]:
        _require_weights_used(self.functional, measure, self.batch)
        return evaluated(self.functional, measure, self.batch)


def evaluated(functional: AbstractFunctional, measure: Empirical, batch: PyTree) -> Float[Array, ""]:
    """G(Q), if it is a floating-point scalar."""
    return require_scalar(f"{functional.name}.value", functional.value(measure, batch), "jnp.mean or jnp.sum")


def require_scalar(name: str, value: Any, reduced_by: str) -> Float[Array, ""]:
    """`value` as one floating-point number of JAX."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
        kind = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must return a floating-point scalar, got {kind}; return a JAX array.")
    if value.shape != ():
        raise ValueError(
            f"{name} must return a scalar, got shape {value.shape}; "
            f"take the mean over cases, and the sum over coordinates, with {reduced_by}."
        )
    return value


def _require_weights_used(functional: AbstractFunctional, measure: Empirical, batch: PyTree) -> None:
    """Read off its program, so that it costs nothing in a run, and no values are compared."""

    def of_weights(weights: Array) -> Array:
        return evaluated(functional, Empirical(measure.particles, weights), batch)

    count = particle_count(measure.particles)
    jaxpr = jax.make_jaxpr(of_weights)(jnp.full((count,), 1 / count)).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    if not used[-1]:
        raise ValueError(
            f"{functional.name}.value does not depend on measure.weights, so its first variation would be "
            "wrong; use measure.integrate(f) for ∫ f dQ, or measure.masses() for the weights."
        )


class ExpectedLoss(AbstractFunctional):
    """∫ ℓ dQ:   V = ℓ.

    Parameters
    ----------
    loss
        ℓ(θ), or ℓ(θ, batch) where the problem has data: a scalar, the *mean* over cases.
    """

    loss: Callable[..., Float[Array, ""]]
    name: ClassVar[str] = "loss"
    convexity: ClassVar[str] = "linear"

    def __check_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(
                f"loss must be a function θ ↦ ℓ(θ), got {self.loss!r}; pass the function, not its value."
            )

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        return jnp.sum(measure.masses() * jax.vmap(eqx.Partial(loss_at, self.loss, batch))(measure.particles))

    def free_energy(self, batch: PyTree = None) -> FreeEnergy:
        return FreeEnergy(potential=eqx.Partial(loss_at, self.loss, batch))

    def words(self, weight: Float[Array, ""]) -> Words:
        factor = "" if number(weight) == "1" else f"{number(weight)}·"
        return Words(f"{factor}∫ ℓ dQ", potential=f"{factor}ℓ")


def loss_at(loss: Callable[..., Any], batch: PyTree, theta: Parameters) -> Float[Array, ""]:
    """ℓ(θ), or ℓ(θ, batch)."""
    return require_scalar("loss", applied("loss", loss, theta, batch), "jnp.mean or jnp.sum")


def applied(name: str, function: Callable[..., Any], theta: Any, batch: PyTree) -> Any:
    """function(θ), or function(θ, batch) where there is a batch."""
    arguments = (theta,) if batch is None else (theta, batch)
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        pass  # some builtin functions have no signature
    except TypeError as error:
        remedy = (
            "where it takes a batch, pass data=(X, y), or batch= outside of solve"
            if batch is None
            else "where it takes θ alone, leave data= out"
        )
        given = "(θ)" if batch is None else "(θ, batch)"
        raise TypeError(f"{name} cannot be called as {name}{given}: {error}; {remedy}.") from None
    return function(*arguments)
