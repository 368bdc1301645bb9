"""Fitted estimators in files: their settings, and what they learned.

They are described by name, and their module, with scikit-learn, is imported when one is loaded.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from measureflow.core.validation import positive_number, require_count, require_leading_axis
from measureflow.networks.likelihoods import AbstractLikelihood
from measureflow.networks.network import Network
from measureflow.saving.encoding import DESCRIBERS, KINDS, Kind, anything
from measureflow.saving.objects import (
    describe_network,
    or_code,
    require,
    require_fit,
    require_floats,
    require_outputs,
)


def _shifted(likelihood: Any, shift: Any) -> Any:
    from measureflow.tables.estimators import Shifted

    require(isinstance(likelihood, AbstractLikelihood), "its likelihood is none")
    require_floats("shift", shift)
    require(np.shape(shift) == (likelihood.width,), "shift has not one number for each output")
    return Shifted(likelihood, shift)


KINDS["Shifted"] = Kind(("likelihood", "shift"), _shifted)
DESCRIBERS["measureflow.tables.estimators.Shifted"] = lambda shifted: (
    "Shifted",
    {"likelihood": or_code(shifted.likelihood), "shift": shifted.shift},
)


_FITTED = (
    "n_features_in_",
    "input_mean_",
    "input_scale_",
    "network_",
    "likelihood_",
    "particles_",
    "prior_weight_",
    "spread_",
    "n_iter_",
    "validation_scores_",
)
_FITTED_BY = {
    "EnsembleRegressor": (*_FITTED, "target_shape_", "target_mean_", "target_scale_"),
    "EnsembleClassifier": (*_FITTED, "classes_"),
}


def _describe_estimator(estimator: Any) -> tuple[str, dict[str, Any]]:
    kind, settings = type(estimator).__name__, estimator.get_params(deep=False)
    fitted = {name: value for name, value in vars(estimator).items() if name not in settings}
    if not set(_FITTED_BY[kind]) <= set(fitted):
        raise ValueError(f"this {kind} is not fitted, so there is nothing to save; call fit first.")
    unknown = set(fitted) - {*_FITTED_BY[kind], "feature_names_in_"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"this {kind} has attributes that no file holds: {names}; delete them before.")
    if isinstance(settings["random_state"], np.random.RandomState):
        warnings.warn(
            "random_state is a generator, which is not saved: it is None in the estimator that is loaded. "
            "Predictions do not depend on it.",
            stacklevel=3,
        )
        settings["random_state"] = None
    # The devices of a mesh belong to this process.
    del settings["mesh"]
    return kind, {"settings": settings, "fitted": fitted}


def _require_settings(estimator: Any) -> None:
    """What `fit` would check, and the types that it would find out later."""
    estimator._check_settings()
    for name, value in estimator.get_params(deep=False).items():
        truth = name in ("early_stopping", "warm_start")
        message = f"{name} is neither True nor False" if truth else f"{name} is a truth value"
        require(isinstance(value, bool | np.bool_) == truth or name == "verbose", message)
    hidden, seed = estimator.hidden, estimator.random_state
    if hidden is not None:
        require(isinstance(hidden, tuple | list), "hidden holds no widths")
        for width in hidden:
            require_count("hidden", width, 1, "")
    Network.mlp(1, (), 1, estimator.activation)
    require(isinstance(estimator.verbose, int | float | np.number | np.bool_), "verbose is no number")
    if seed is not None:
        require(require_count("random_state", seed, 0, "") < 2**32, "random_state is too large")


def _require_table(name: str, mean: Any, scale: Any, shape: tuple[int, ...]) -> None:
    for value in (mean, scale):
        floats = isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64
        require(
            floats and value.shape == shape and np.isfinite(value).all(),
            f"{name}_mean_ and {name}_scale_ are not finite numbers of shape {shape}",
        )
    require(np.all(scale > 0), f"{name}_scale_ is not > 0")


def _require_fitted(estimator: Any) -> None:
    """What every fitted estimator must be for its predictions to make sense."""
    features, names = estimator.n_features_in_, getattr(estimator, "feature_names_in_", None)
    require(type(features) is int and features > 0, "n_features_in_ is no number of features")
    _require_table("input", estimator.input_mean_, estimator.input_scale_, (features,))
    if names is not None:
        texts = isinstance(names, np.ndarray) and names.dtype == object
        require(texts and names.shape == (features,), "feature_names_in_ has not one name for each feature")
    for name in ("prior_weight_", "spread_"):
        positive_number(name, getattr(estimator, name), "")
    require(not isinstance(estimator.n_iter_, bool), "n_iter_ is a truth value")
    require_count("n_iter_", estimator.n_iter_, 0, "")
    require(_are_scores(estimator.validation_scores_), "validation_scores_ are no scores")
    require(isinstance(estimator.network_, Network), "network_ is no network")
    require(isinstance(estimator.particles_, list | dict), "particles_ are none")
    leaves = jax.tree.leaves(estimator.particles_)
    floats = all(isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    require(floats and all(np.isfinite(leaf).all() for leaf in leaves), "particles_ are not finite numbers")
    require_leading_axis("particles_", estimator.particles_, "particle")
    require_fit(estimator.network_, estimator.particles_)
    kind, fields = describe_network(estimator.network_)
    require(kind == "Network.mlp" and fields["sizes"][0] == features, "network_ has not these features")


def _are_scores(table: Any) -> bool:
    """One number of each kind for every candidate."""
    if not isinstance(table, dict) or set(table) != {"prior_weight", "share_of_steps", "log_density"}:
        return False
    columns = table.values()
    floats = all(isinstance(column, np.ndarray) and column.dtype == np.float64 for column in columns)
    return floats and len({np.shape(column) for column in columns}) == 1 and np.ndim(next(iter(columns))) == 1


def _require_targets(estimator: Any) -> None:
    """Classes, or the targets' scale, and that the likelihood is one for them."""
    if hasattr(estimator, "classes_"):
        classes = estimator.classes_
        one_each = isinstance(classes, np.ndarray) and classes.ndim == 1 and len(classes) > 1
        require(one_each and np.array_equal(np.unique(classes), classes), "classes_ are no sorted classes")
    else:
        shape = estimator.target_shape_
        counts = isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)
        require(counts and len(shape) <= 1, "target_shape_ is no shape of targets")
        _require_table("target", estimator.target_mean_, estimator.target_scale_, shape)
    # Its numbers are the file's own: those of another version may be others.
    kinds = [_law(likelihood) for likelihood in (estimator._likelihood()[0], estimator.likelihood_)]
    require(kinds[0] == kinds[1], "likelihood_ is not that of the settings and the targets")
    require_outputs(estimator.network_, estimator.likelihood_)


def _law(likelihood: Any) -> tuple[Any, ...]:
    law = getattr(likelihood, "likelihood", likelihood)
    return type(likelihood), type(law), law.targets, law.width


def _estimator(kind: str) -> Callable[..., Any]:
    def build(settings: Any, fitted: Any) -> Any:
        from measureflow.tables import estimators

        chosen = getattr(estimators, kind)
        names = set(chosen._get_param_names()) - {"mesh"}
        known = isinstance(settings, dict) and set(settings) == names
        require(known, f"its settings are not those of an {kind}")
        known = isinstance(fitted, dict) and set(fitted) - {"feature_names_in_"} == set(_FITTED_BY[kind])
        require(known, f"what it learned is not what an {kind} learns")
        estimator = chosen(**settings)
        vars(estimator).update(fitted)
        _require_settings(estimator)
        _require_fitted(estimator)
        _require_targets(estimator)
        return estimator

    return build


for _name in _FITTED_BY:
    KINDS[_name] = Kind(("settings", "fitted"), _estimator(_name), anything)
    DESCRIBERS[f"measureflow.tables.estimators.{_name}"] = _describe_estimator
