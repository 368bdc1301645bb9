"""What a fitted ensemble predicts: the mixture over its networks, in the units of the targets; and how it is
kept in a file."""

import abc
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator

from measureflow.core.compiled import keep_programs
from measureflow.networks.network import Network
from measureflow.prediction.predictive import Mixture, Predictive
from measureflow.prediction.spread import Spread
from measureflow.runs.history import History
from measureflow.saving.container import PathLike
from measureflow.saving.documents import save
from measureflow.tables.encoding import PiecewiseLinear, encoded
from measureflow.tables.exporting import Exportable
from measureflow.tables.frames import Columns
from measureflow.tables.inputs import numbers, require_fitted
from measureflow.tables.models import Shape
from measureflow.tables.posterior import Verdict
from measureflow.tables.scaling import standardised
from measureflow.tables.smoother import Smoother


class AbstractFitted(Exportable, BaseEstimator, abc.ABC):
    """An estimator, as far as it predicts."""

    #: Set by `fit`, from the data.
    n_features_in_: int
    columns_: Columns | None = None
    input_mean_: np.ndarray
    input_scale_: np.ndarray
    shape_: Shape
    encoding_: PiecewiseLinear | None
    smoother_: Smoother | None = None
    network_: Network
    likelihood_: Callable
    particles_: Any
    prior_weight_: float
    members_: dict[str, np.ndarray]
    spread_: float
    spread_power_: float
    typical_deviation_: float
    n_iter_: int
    history_: History
    validation_scores_: dict[str, np.ndarray]
    certificate_: Verdict | None = None

    def _units(self) -> tuple[Any, Any]:
        """Location and scale of what the network predicts; None where it has no units."""
        return None, None

    @abc.abstractmethod
    def _spreads(self, network: Network, likelihood: Callable) -> np.ndarray:
        """The factors and powers among which held-out rows choose the spread of a law."""

    def _sees_logarithms(self) -> bool:
        """Whether the network predicts log y."""
        return False

    def _transform(self) -> Any:
        """What the network sees of y, if not y itself or its logarithm."""
        return None

    def _inner(self) -> tuple[Any, ...]:
        """Units, and transform, of laws in single precision: all but what `_in_units` adds afterwards."""
        if self._transform() is not None:
            return (*self._units(), self._transform().standardised)
        # Of log y, the scale is inside the exponential; its location is a factor outside.
        return (0.0, self._units()[1]) if self._sees_logarithms() else ()

    def _predictive(self, location: Any = None, scale: Any = None, transform: Any = None) -> Predictive:
        particles = jax.tree.map(jnp.asarray, self.particles_)
        spread = None
        if len(self._spreads(self.network_, self.likelihood_)) > 1:
            spread = Spread(self.spread_, self.spread_power_, self.typical_deviation_)
        law = (self.network_, self.likelihood_, particles)
        return Predictive(*law, location, scale, spread, self._sees_logarithms(), transform)

    def _map(self, function: Callable, X: Any) -> Any:
        """`function` of the predictive mixture of every row, in the units that the network sees."""
        keep_programs()
        rows = self._rows(X)
        values = self._predictive(*self._inner()).map(function, rows)
        return jax.tree.map(lambda value: np.asarray(value, np.float64), values)

    def _rows(self, X: Any) -> np.ndarray:
        require_fitted(self)
        inputs = standardised(numbers(self, X), self.input_mean_, self.input_scale_)
        rows = encoded(self.encoding_, inputs)
        return rows if self.smoother_ is None else np.concatenate([rows, self.smoother_(inputs)], axis=1)

    def predict_dist(self, X: Any) -> Mixture:
        """p(y | x) for every row: the mixture over particles, a NumPyro distribution.

        It is computed in single precision, in standardised units; its numbers in the units of the targets are
        float64 of NumPy."""
        rows = self._rows(X)
        return self._predictive(*self._units(), self._transform())(rows)

    def __getstate__(self) -> dict[str, Any]:
        # The devices of a mesh belong to this process, and so do arrays of JAX, which not all can write.
        state = cast(dict, super().__getstate__()) | {"mesh": None}
        return state | _moved(np.asarray, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | _moved(jnp.asarray, state))

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write the fitted estimator to one file, for `mf.load`: see `mf.save`."""
        save(self, path, force=force)


def _moved(place: Callable, state: dict[str, Any]) -> dict[str, Any]:
    """Network and likelihood of a fitted estimator, with the arrays of another library."""
    functions = {name: state[name] for name in ("network_", "likelihood_") if name in state}
    return jax.tree.map(lambda leaf: place(leaf) if eqx.is_array(leaf) else leaf, functions)
