"""From particles to predictions, row by row: x ↦ p(y | x) = (1/N) Σᵢ p(y | x, θᵢ)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpyro.distributions import Distribution

from measureflow.core.pytrees import Particles, is_concrete, shapes_of, shown_shapes
from measureflow.core.showing import or_fields, shown
from measureflow.core.validation import (
    positive_number,
    require_leading_axis,
    require_particles,
    require_representable,
)
from measureflow.networks.likelihoods import AbstractLikelihood, distribution_of
from measureflow.networks.network import Network
from measureflow.networks.priors import outputs_of
from measureflow.networks.rescaling import require_rescalable
from measureflow.networks.validation import require_likelihood, require_network
from measureflow.prediction.logarithmic import LogMixture
from measureflow.prediction.mixture import Mixture
from measureflow.prediction.spread import Spread
from measureflow.prediction.units import Units, unit
from measureflow.prediction.yeo_johnson import YeoJohnson, YeoJohnsonMixture
from measureflow.saving.registry import require, saved
from measureflow.spaces.empirical import Empirical

__all__ = ["BLOCK", "LogMixture", "Mixture", "Predictive", "YeoJohnson", "YeoJohnsonMixture"]

# Rows are evaluated so many at a time. Always: the last digits of a row's result depend on the size of its
# block, and a new size is a new program.
BLOCK = 256


def _like(values: dict[str, Any]) -> Any:
    """In a file, particles have the structure of the network's parameters."""
    network: Any = values.get("network")
    shapes = network.point() if isinstance(network, Network) else None
    return jax.tree.map(lambda leaf: "", shapes)


def require_sound(predictive: "Predictive") -> None:
    """Raises where a file says what cannot be: particles are those of the network, its outputs are what the
    likelihood reads, and units are the targets'."""
    network, law = predictive.network, getattr(predictive.likelihood, "likelihood", predictive.likelihood)
    if isinstance(network, Network):
        wanted = network.point()
        found = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], predictive.particles))
        shown = shown_shapes(found), shown_shapes(wanted)
        message = "the particles have shapes {}, the network's parameters {}".format(*shown)
        require(shapes_of(found) == shapes_of(wanted), message)
        if isinstance(law, AbstractLikelihood) and (outputs := outputs_of(network)) is not None:
            message = f"the network has {outputs} outputs, and the likelihood reads {law.width}"
            require(outputs == law.width, message)
    if isinstance(law, AbstractLikelihood):
        event = () if law.targets == 1 else (law.targets,)
        units = [value.shape for value in (predictive.location, predictive.scale) if value is not None]
        message = "location or scale are not those of the targets"
        require(all(shape in ((), event) for shape in units), message)


_CODE = ("network", "likelihood")


@saved(check=require_sound, like=_like, code=_CODE, given=_CODE)
class Predictive(eqx.Module):
    """x ↦ p(y | x) = (1/N) Σᵢ p(y | f_θᵢ(x)): the mixture over particles.

    Rows are evaluated in blocks of a fixed size, the last one filled up: one program for any number of rows,
    and what is predicted for a row does not depend on how many others are asked for. Within `jax.jit` or
    `jax.vmap`, where shapes are fixed anyway, all rows are one block.

    Parameters
    ----------
    network
        f_θ.
    likelihood
        outputs ↦ NumPyro distribution: any function that acts on the last axis of its argument.
    particles
        A pytree whose leaves share a leading axis. For a Gaussian measure, as FD-GVI returns it, pass
        `measure.sample(key, n)`.
    location, scale
        Where targets were standardised, (y − location)/scale: numbers, or one per target. Predictions are
        then in the units of y, in float64.
    spread
        A factor for the width of the mixture about its median, as held-out rows may ask for: a number, or a
        `Spread`. Of classes, the temperature.
    log
        Whether the network sees log y: then location, scale and spread are of log y, and what is predicted
        is a `LogMixture`, the law of y itself.
    transform
        What the network sees of y, if not y itself: then location, scale and spread are of ψ(y), and what is
        predicted is a `YeoJohnsonMixture`.
    """

    network: Network
    likelihood: Callable[[Array], Distribution]
    particles: Particles
    location: Float[Array | np.ndarray, "..."] | None
    scale: Float[Array | np.ndarray, "..."] | None
    spread: Spread | None
    log: bool = eqx.field(static=True)
    transform: YeoJohnson | None
    # Known while tracing, too, when location and scale are not.
    _units_fit: bool = eqx.field(static=True, init=False)

    def __init__(
        self,
        network: Network,
        likelihood: Callable[[Array], Distribution],
        particles: PyTree,
        location: Any = None,
        scale: Any = None,
        spread: Any = None,
        log: bool = False,
        transform: YeoJohnson | None = None,
    ):
        require_network(network)
        require_likelihood(likelihood)
        self.network, self.likelihood = network, likelihood
        self.particles = require_particles("particles", particles, with_statistics=True)
        self.location = None if location is None else _number_or_one_per_target("location", location)
        self.scale = None if scale is None else _number_or_one_per_target("scale", scale)
        self.spread = None
        if spread is not None:
            if not isinstance(spread, Spread):
                spread = Spread(positive_number("spread", spread, "None leaves the law as it is."))
            self.spread = spread
        self.log, self.transform = bool(log), transform
        if log and transform is not None:
            raise ValueError("log=True and transform= are two transforms of y; leave one of them out.")
        self._units_fit = Units(self.location, self.scale).fit

    @or_fields
    def __repr__(self) -> str:
        measure, likelihood = Empirical(self.particles), shown(self.likelihood)
        spread = "" if self.spread is None else f", spread {shown(self.spread.factor)}"
        return f"Predictive({measure!r}, likelihood {likelihood}{spread})"

    def __call__(self, inputs: PyTree) -> Any:
        """The mixture for all rows, a `Mixture`, or a law of what it transforms: batch shape (rows,).

        It holds the outputs of all particles for all rows, and NumPyro's methods compile for each number of
        rows; `map` does neither.
        """
        inputs = _rows(inputs)
        if not is_concrete((eqx.filter(self, eqx.is_array), inputs)):
            return self._mixture(_outputs(self.network, self.particles, inputs))
        outputs = _in_blocks(eqx.Partial(_compiled_outputs, self.network, self.particles), inputs)
        return self._mixture(jnp.asarray(outputs))

    def map(self, function: Callable[[Mixture], PyTree], inputs: PyTree) -> PyTree:
        """function(mixture of a block of rows), for all rows: a pytree of NumPy arrays, rows first.

        Only one block is in memory at a time, and network and function are one compiled program. A function
        is part of the program: pass one that is defined once, with its numbers bound by `eqx.Partial`, so
        that a new number compiles nothing:

            def interval(coverage, mixture):
                return mixture.interval(coverage)

            low, high = predictive.map(eqx.Partial(interval, jnp.asarray(0.9)), inputs)
        """
        if not callable(function):
            raise TypeError(f"function must map a Mixture to arrays, got {function!r}; pass a function.")
        inputs = _rows(inputs)
        if not is_concrete((eqx.filter(self, eqx.is_array), inputs)):
            return function(self(inputs))
        return _in_blocks(eqx.Partial(_compiled_map, self, function), inputs)

    def _mixture(self, outputs: Float[Array, "rows n k"]) -> Any:
        if not isinstance(self.likelihood, AbstractLikelihood):
            _require_last_axis_only(self.likelihood, outputs)
        distribution = distribution_of(self.likelihood, outputs)
        mixture = Mixture(distribution)
        if self.location is not None or self.scale is not None:
            units = Units(self.location, self.scale, fit=self._units_fit)
            require_rescalable(distribution, units.location, units.scale)
            mixture = mixture.in_units(units)
        if self.spread is not None:
            of_classes = mixture.has_classes
            mixture = mixture.tempered(self.spread.factor) if of_classes else mixture.widened(self.spread)
        if self.transform is not None:
            return YeoJohnsonMixture(mixture, self.transform)
        return LogMixture(mixture) if self.log else mixture


def _number_or_one_per_target(name: str, value: Any) -> Float[Array | np.ndarray, "..."]:
    number = unit(name, value)
    if number.ndim > 1:
        raise ValueError(
            f"{name} must be a number, or one per target, got shape {number.shape}; it is in units of the "
            "targets."
        )
    return number


def _require_last_axis_only(likelihood: Callable, outputs: Float[Array, "rows n k"]) -> None:
    """Try the likelihood on shapes with no two axes alike: outputs[:, 0] instead of outputs[..., 0] could
    otherwise take the particles for the outputs without any error."""
    width = outputs.shape[-1]
    other = jax.ShapeDtypeStruct((width + 1, width + 2, width), outputs.dtype)
    jax.eval_shape(lambda array: distribution_of(likelihood, array), other)


def _outputs(network: Network, particles: Particles, inputs: PyTree) -> Float[Array, "rows n k"]:
    return jax.vmap(network.apply, in_axes=(0, None), out_axes=1)(particles, inputs)


_compiled_outputs = eqx.filter_jit(_outputs)


@eqx.filter_jit
def _compiled_map(predictive: Predictive, function: Callable, inputs: PyTree) -> PyTree:
    result = function(predictive._mixture(_outputs(predictive.network, predictive.particles, inputs)))
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(result)]
    if not shapes or any(shape[:1] != (BLOCK,) for shape in shapes):
        raise ValueError(
            f"function must return arrays with one row per row of the mixture, got shapes "
            f"{shown_shapes(result)} for {BLOCK} rows; put the rows first, as in mixture.quantile(q).T for q "
            "of shape (m, 1)."
        )
    return result


def _rows(inputs: PyTree) -> PyTree:
    """Inputs, checked: one row for each case."""
    if hasattr(inputs, "shape") and len(inputs.shape) == 1:
        raise ValueError(
            f"inputs must have a row for each case, got shape {tuple(inputs.shape)}; pass x[:, None] for one "
            "feature, or x[None] for one case."
        )
    return require_leading_axis("inputs", inputs, "case")


def _in_blocks(program: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree[np.ndarray]:
    """program(inputs), block by block; while one is computed, the one before is fetched."""
    inputs = require_representable("inputs", jax.tree.map(np.asarray, inputs))
    rows = len(jax.tree.leaves(inputs)[0])
    results, pending = [], None
    for start in range(0, rows, BLOCK):
        # Copies of the last row, which is a case like others, fill up the last block.
        chosen = np.minimum(np.arange(start, start + BLOCK), rows - 1)
        running = program(jax.tree.map(lambda leaf, chosen=chosen: jnp.asarray(leaf[chosen]), inputs))
        results += [] if pending is None else [jax.device_get(pending)]
        pending = running
    results.append(jax.device_get(pending))
    return jax.tree.map(lambda *blocks: np.concatenate(blocks)[:rows], *results)
