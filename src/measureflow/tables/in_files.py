"""Fitted estimators in files: what they hold, and what a file must say of one to be believed."""

import warnings
from typing import Any

import equinox as eqx
import jax
import numpy as np

from measureflow.core.validation import positive_number, require_count
from measureflow.networks.network import Network
from measureflow.networks.priors import perceptron
from measureflow.prediction.predictive import require_sound
from measureflow.runs.history import History
from measureflow.saving.registry import kind_of, require, saved
from measureflow.tables.encoding import PiecewiseLinear
from measureflow.tables.frames import Columns
from measureflow.tables.members import COLUMNS, require_members
from measureflow.tables.methods import METHODS
from measureflow.tables.models import Shape
from measureflow.tables.posterior import Verdict
from measureflow.tables.settings import check_settings
from measureflow.tables.smoother import WIDTH, Smoother


def _described(estimator: Any) -> dict[str, Any]:
    """For a file: settings, and what `fit` has learned, which is what the classes annotate."""
    kind, settings = type(estimator), estimator.get_params(deep=False)
    fitted = {name: value for name, value in vars(estimator).items() if name not in settings}
    annotated = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})]
    learned = {name for name in annotated if name.endswith("_") and not name.startswith("_")}
    if not learned <= set(fitted):
        raise ValueError(f"this {kind.__name__} is not fitted, so there is nothing to save; call fit first.")
    if unknown := ", ".join(sorted(set(fitted) - learned - {"feature_names_in_"})):
        raise ValueError(f"this {kind.__name__} has attributes that no file holds: {unknown}; delete them.")
    if isinstance(settings["random_state"], np.random.RandomState):
        warnings.warn(
            "random_state is a generator, which is not saved: it is None in the estimator that is loaded. "
            "Predictions do not depend on it.",
            stacklevel=5,
        )
        settings["random_state"] = None
    # The devices of a mesh belong to this process.
    del settings["mesh"]
    settings["method"] = _method_name(kind.__name__, settings["method"])
    if "likelihood" in settings:
        settings["likelihood"] = _known_likelihood(kind.__name__, settings["likelihood"])
    if isinstance(settings.get("class_weight"), dict):
        # Labels need not be texts, as the keys of a file's dictionaries are.
        pairs = settings["class_weight"].items()
        settings["class_weight"] = [(np.asarray(label).item(), weight) for label, weight in pairs]
    if not isinstance(settings.get("ordinal", False), bool):
        settings["ordinal"] = np.asarray(settings["ordinal"]).tolist()
    return {"settings": settings, "fitted": fitted}


def _method_name(kind: str, method: Any) -> str:
    """By which the estimator that is loaded finds it again."""
    if isinstance(method, str):
        return method
    if METHODS.get(method.name) != method:
        raise TypeError(
            f"this {kind} has a method of your own, {method.name!r}, and a file holds no code; pickle the "
            "estimator, or save an mf.Predictive of its network_, likelihood_ and particles_."
        )
    return method.name


def _known_likelihood(kind: str, likelihood: Any) -> Any:
    if likelihood is None or isinstance(likelihood, str) or kind_of(likelihood) is not None:
        return likelihood
    raise TypeError(
        f"this {kind} has a likelihood of your own, {likelihood!r}, and a file holds no code; pickle the "
        "estimator, or save an mf.Predictive of its network_, likelihood_ and particles_."
    )


def require_units(name: str, mean: Any, scale: Any, shape: tuple[int, ...]) -> None:
    """Means and scales that `fit` could have learned."""
    floats = all(isinstance(v, np.ndarray | np.generic) and v.dtype == np.float64 for v in (mean, scale))
    finite = floats and mean.shape == scale.shape == shape and np.isfinite([mean, scale]).all()
    message = f"{name}_mean_ and {name}_scale_ > 0 are not finite numbers of shape {shape}"
    require(finite and np.all(scale > 0), message)


def _require_sound(estimator: Any) -> None:
    """What `fit` would check, and that what was learned goes together: raises where a file says else."""
    check_settings(estimator)
    for name in ("early_stopping", "warm_start"):
        require(isinstance(getattr(estimator, name), bool | np.bool_), f"{name} is neither True nor False")
    hidden, seed = estimator.hidden, estimator.random_state
    require(isinstance(hidden, tuple | list | None) and len(hidden or ()) < 100, "hidden is not widths")
    Network.mlp(1, hidden or (), 1, estimator.activation or "relu")
    require(seed is None or require_count("random_state", seed, 0, "") < 2**32, "random_state is too large")
    for name in ("prior_weight_", "spread_", "typical_deviation_"):
        positive_number(name, getattr(estimator, name), "")
    power = estimator.spread_power_
    require(isinstance(power, float) and 0 <= power <= 1, "spread_power_ is not between 0 and 1")
    require_count("n_iter_", estimator.n_iter_, 0, "")
    require_members(estimator.members_, estimator.particles, "members_")
    require(estimator.members_ is not None, "members_ are missing")
    require(isinstance(estimator.history_, History), "history_ is no history")
    require(isinstance(estimator.certificate_, Verdict | None), "certificate_ is no verdict")
    require(_are_scores(estimator.validation_scores_), "validation_scores_ are no scores")
    features, names = estimator.n_features_in_, getattr(estimator, "feature_names_in_", None)
    require(type(features) is int and features > 0, "n_features_in_ is no number of features")
    numbers = _width(estimator.columns_, features)
    require_units("input", estimator.input_mean_, estimator.input_scale_, (numbers,))
    named = names is None or (isinstance(names, np.ndarray) and names.shape == (features,))
    require(named, "feature_names_in_ has not one name for each feature")
    estimator._require_targets()
    # Its numbers are the file's own: those of another version may be others.
    shape, encoding = estimator.shape_, estimator.encoding_
    require(_is_shape(shape), "shape_ is no shape of a model")
    layers = hidden is None or tuple(hidden) == shape.hidden
    require(layers, "shape_ has not the hidden layers of the settings")
    require(estimator.encoding in (None, shape.encoding), "shape_ has not the encoding of the settings")
    asked = getattr(estimator, "likelihood", None)
    same = asked is None or bool(eqx.tree_equal(asked, shape.likelihood))
    require(same, "likelihood_ is not that of the settings and the targets")
    head = estimator._head(shape.likelihood, estimator._target_units())
    now, then = (_law(law) for law in (head.likelihood, estimator.likelihood_))
    require(now == then, "likelihood_ is not that of the settings and the targets")
    require(encoding is None or isinstance(encoding, PiecewiseLinear), "encoding_ is no encoding")
    require((0 if encoding is None else encoding.bins) == shape.encoding, "encoding_ has not so many bins")
    require(encoding is None or len(encoding.binned) == numbers, "encoding_ is not of these columns")
    smoother = estimator.smoother_
    sound = smoother is None or (isinstance(smoother, Smoother) and smoother.centres.shape[1] == numbers)
    require(sound, "smoother_ is not of these columns")
    said = 0 if smoother is None else WIDTH
    inner, width = perceptron(estimator.network_), said + (numbers if encoding is None else encoding.width)
    require(inner is not None and inner.sizes[0] == width, "network_ has not these features")
    leaves = jax.tree.leaves(estimator.particles_)
    finite = all(isinstance(leaf, np.ndarray) and np.isfinite(leaf).all() for leaf in leaves)
    require(finite, "particles_ are no finite numbers")
    require_sound(estimator._predictive(*estimator._units()))


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, Shape)
        and isinstance(shape.hidden, tuple)
        and all(type(width) is int and width > 0 for width in shape.hidden)
        and type(shape.encoding) is int
        and shape.encoding >= 0
    )


def _width(columns: Any, features: int) -> int:
    """How many numbers a row is: the columns of an array, or what a frame's columns become."""
    if columns is None:
        return features
    known = isinstance(columns, Columns) and len(columns.columns) == features
    require(known, "columns_ has not one entry for each feature")
    return columns.width


def _are_scores(table: Any) -> bool:
    """One number of each kind for every candidate."""
    names = {"model", *COLUMNS, "log_density", "share"}
    if not isinstance(table, dict) or set(table) != names:
        return False
    columns = list(table.values())
    kinds = [np.str_ if name == "model" else np.float64 for name in table]
    floats = all(
        isinstance(column, np.ndarray) and column.dtype.type is kind
        for column, kind in zip(columns, kinds, strict=True)
    )
    return floats and len({column.shape for column in columns}) == 1 and columns[0].ndim == 1


def _law(likelihood: Any) -> tuple[Any, ...]:
    law = getattr(likelihood, "likelihood", likelihood)
    return type(likelihood), type(law), law.targets, law.width


def in_files(kind: Any) -> Any:
    """Let files hold fitted estimators of this class."""

    def build(settings: dict[str, Any], fitted: dict[str, Any]) -> Any:
        if isinstance(settings.get("class_weight"), list):
            settings = settings | {"class_weight": dict(settings["class_weight"])}
        estimator = kind(**settings)
        vars(estimator).update(fitted)
        return estimator

    return saved(kind, build=build, describe=_described, check=_require_sound)
