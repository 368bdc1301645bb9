"""Functions of moments of Q."""

from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float, PyTree

from measureflow.spaces.empirical import Empirical
from measureflow.statement.functionals import AbstractFunctional, applied, require_scalar
from measureflow.statement.words import Words, number


class Moment(AbstractFunctional):
    """φ(∫ g dQ): convex in Q where φ is convex.

    The loss of a two-layer network of infinite width, whose output is ∫ g(θ, x) dQ, is one: its flow is
    mean-field Langevin dynamics (Mei, Montanari and Nguyen, 2018; Hu, Ren, Šiška and Szpruch, 2021).

    Parameters
    ----------
    features
        g(θ), or g(θ, batch) where the problem has data: any pytree of arrays.
    function
        φ(m), or φ(m, batch): a scalar, the mean over cases.
    """

    features: Callable[..., PyTree]
    function: Callable[..., Float[Array, ""]]
    name: ClassVar[str] = "moment"
    convexity: ClassVar[str] = "convex where φ is"

    def __check_init__(self) -> None:
        for name, given in (("features", self.features), ("function", self.function)):
            if not callable(given):
                raise TypeError(
                    f"Moment {name} must be a function, got {given!r}; pass Moment(g, φ) for φ(∫ g dQ)."
                )

    def value(self, measure: Empirical, batch: PyTree = None) -> Float[Array, ""]:
        mean = measure.integrate(lambda theta: applied("Moment features", self.features, theta, batch))
        value: Any = applied("Moment function", self.function, mean, batch)
        return require_scalar("Moment function", value, "jnp.mean or jnp.sum")

    def words(self, weight: Float[Array, ""]) -> Words:
        formula = f"{number(weight)}·φ(∫ g dQ)"
        return Words(formula, rest=formula)
