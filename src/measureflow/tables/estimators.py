"""scikit-learn's estimators around the recipe: tables in, distributions out. No mathematics here."""

import abc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpyro.distributions import Distribution
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone, is_classifier
from sklearn.model_selection import check_cv
from sklearn.utils import Tags, check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from measureflow.core.devices import require_mesh
from measureflow.core.pytrees import dimension
from measureflow.core.validation import positive_number, require_count
from measureflow.networks import likelihoods
from measureflow.networks.network import Network, perceptron
from measureflow.prediction import metrics
from measureflow.prediction.predictive import Mixture, Predictive, require_sound
from measureflow.saving.container import PathLike
from measureflow.saving.documents import save
from measureflow.saving.registry import require, saved
from measureflow.tables.recipe import METHODS, Ensembles, Recipe, Table, Trainer, batch_size_for, steps_for
from measureflow.tables.scaling import moments, standardised

# In units of the targets' standard deviation: noise below this is not believed.
_SMALLEST_SCALE = 1e-3
_NOISE = {
    "heteroscedastic": likelihoods.Heteroscedastic,
    "homoscedastic": likelihoods.Homoscedastic,
    "student_t": likelihoods.StudentT,
}
_COUNTS = {"poisson": likelihoods.Poisson, "negative_binomial": likelihoods.NegativeBinomial}
# Of the sum n of all weights, 1/n is the prior's weight: a number in single precision.
_WEIGHTS = (1e-30, 1e30)

Own = TypeVar("Own", bound="AbstractEnsemble")


class AbstractEnsemble(BaseEstimator, abc.ABC):
    """What regression and classification share: settings, scaling, the fit, and prediction in blocks."""

    #: Set by `fit`, from the data.
    n_features_in_: int
    input_mean_: np.ndarray
    input_scale_: np.ndarray
    network_: Network
    likelihood_: Callable
    particles_: Any
    prior_weight_: float
    spread_: float
    n_iter_: int
    validation_scores_: dict[str, np.ndarray]

    def __init__(
        self,
        method: str = "DRLE",
        *,
        particles: int = 20,
        hidden: Sequence[int] | None = None,
        activation: str = "relu+tanh",
        prior_weight: float | None = None,
        mmd: float = 0.5,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float = 0.01,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
        mesh: Mesh | None = None,
    ):
        self.method = method
        self.particles = particles
        self.hidden = hidden
        self.activation = activation
        self.prior_weight = prior_weight
        self.mmd = mmd
        self.steps = steps
        self.batch_size = batch_size
        self.step_size = step_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose
        self.mesh = mesh

    def fit(self: Own, X: Any, y: Any, sample_weight: Any = None) -> Own:
        """Learn from rows X and targets y. A row of weight k counts as k equal rows."""
        table = self._prepare(X, y, sample_weight)
        self._learn([self], [table])
        return self

    def _prepare(self, X: Any, y: Any, sample_weight: Any) -> Table:
        """Check everything, learn the scaling, build the network; the standardised table."""
        self._check_settings()
        again = self._goes_on()
        X, y = self._validated(X, y, again)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise ValueError("sample_weight is zero for every row; give some rows a weight > 0.")
        with np.errstate(over="ignore"):
            total = weights.sum()
        if not _WEIGHTS[0] < total < _WEIGHTS[1]:
            raise ValueError(
                f"sample_weight sums to {total:.3g}, but a row of weight k counts as k equal rows; divide it "
                "by its mean."
            )
        X, y, weights = X[weights > 0], y[weights > 0], weights[weights > 0]
        if again:
            self._require_unchanged()
        else:
            names = getattr(self, "feature_names_in_", None)
            self.input_mean_, self.input_scale_ = moments("X", X, weights, names)
            self._set_targets(y, weights)
            hidden = (50,) if len(X) <= 20_000 else (100,)
            self.network_, self.likelihood_ = self._network(hidden if self.hidden is None else self.hidden)
        inputs = standardised(X, self.input_mean_, self.input_scale_)
        return Table.of(inputs, self._encoded(y), weights)

    def _goes_on(self) -> bool:
        """Whether a fit continues the one before."""
        return self.warm_start and hasattr(self, "particles_")

    @abc.abstractmethod
    def _validated(self, X: Any, y: Any, again: bool) -> tuple[np.ndarray, np.ndarray]:
        """Rows and targets, checked; `again` against what a warm start goes on from."""

    @abc.abstractmethod
    def _set_targets(self, y: np.ndarray, weights: np.ndarray) -> None:
        """Learn what the targets are: their scale, or their classes."""

    @abc.abstractmethod
    def _likelihood(self) -> tuple[Callable, int, int]:
        """The likelihood, the network's outputs, and how many constants follow them."""

    @abc.abstractmethod
    def _encoded(self, y: np.ndarray) -> np.ndarray:
        """Targets as the network sees them."""

    @abc.abstractmethod
    def _units(self) -> tuple[Any, Any]:
        """Location and scale of what the network predicts; None where it has no units."""

    @abc.abstractmethod
    def _calibrates(self) -> bool:
        """Whether the spread of the predictive law is chosen."""

    def _check_settings(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        require_count("particles", self.particles, 1, "20 is a start.")
        positive_number("mmd", self.mmd, "0.5 is a start; for none, choose method='DLE' or 'DE'.")
        positive_number("step_size", self.step_size, "0.01 is a start.")
        if self.prior_weight is not None:
            positive_number("prior_weight", self.prior_weight, "1 is the Bayes posterior; None chooses it.")
        if self.method == "FD-GVI" and self.particles == 1 and self._goes_on():
            raise ValueError(
                "warm_start with method='FD-GVI' goes on from the Gaussian of the last fit's particles, and "
                "particles=1 has no spread; begin anew with warm_start=False, and more particles."
            )
        if self.mesh is not None:
            require_mesh(self.mesh, self.particles)
            if self.method == "FD-GVI":
                raise ValueError("mesh cuts particles, and method='FD-GVI' has none; leave the mesh out.")
        for name in ("steps", "batch_size"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), 1, "None goes by the number of rows.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, got {self.validation_fraction}; try 0.1."
            )

    def _network(self, hidden: Sequence[int]) -> tuple[Network, Callable]:
        likelihood, outputs, constants = self._likelihood()
        network = Network.mlp(self.n_features_in_, hidden, outputs, self.activation)
        return network.with_constants(constants) if constants else network, likelihood

    def _require_unchanged(self) -> None:
        """A warm start goes on with the particles that there are: what shapes them must be as it was."""
        layers = self.particles_["network"] if isinstance(self.particles_, dict) else self.particles_
        hidden = [layer["bias"].shape[-1] for layer in layers[:-1]] if self.hidden is None else self.hidden
        now = (*self._network(hidden), self.particles)
        before = (self.network_, self.likelihood_, len(jax.tree.leaves(self.particles_)[0]))
        if not eqx.tree_equal(now, before):
            raise ValueError(
                "warm_start goes on from the last fit, but hidden, activation, particles or likelihood were "
                "changed since; set warm_start=False to begin anew."
            )

    def _recipe(self, rows: int, parameters: int) -> Recipe:
        goes_on = self._goes_on() and self.prior_weight is None
        prior_weight = self.prior_weight_ if goes_on else self.prior_weight
        return Recipe(
            method=self.method,
            particles=self.particles,
            mmd=float(self.mmd),
            prior_weight=None if prior_weight is None else float(prior_weight),
            step_size=float(self.step_size),
            batch_size=batch_size_for(rows) if self.batch_size is None else self.batch_size,
            calibrate=self._calibrates(),
            mesh=self.mesh,
            steps=self.steps or steps_for(rows, parameters, classes=is_classifier(self)),
        )

    def _learn(self, estimators: "list[AbstractEnsemble]", tables: list[Table]) -> None:
        """Fit one ensemble per table, all in one program, and give each to its estimator."""
        rng = check_random_state(self.random_state)
        validation = None
        if self.early_stopping:
            cut = [_held_out(table, self.validation_fraction, rng) for table in tables]
            tables, validation = [train for train, _ in cut], [held_out for _, held_out in cut]
        key = jax.random.key(int(rng.randint(np.iinfo(np.int32).max)))
        initial = None
        if self._goes_on():
            initial = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], self.particles_)
        prior = self.network_.prior()
        recipe = self._recipe(max(len(table.weights) for table in tables), dimension(prior.mean))
        trainer = Trainer(self.network_, self.likelihood_, prior, recipe, self.verbose > 0)
        ensembles = trainer.fit(tables, key, initial=initial, validation=validation)
        for index, estimator in enumerate(estimators):
            estimator._take(ensembles, index)

    def _take(self, ensembles: Ensembles, index: int) -> None:
        again = self._goes_on()
        particles = jax.tree.map(lambda leaf: np.asarray(leaf[index]), ensembles.particles)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(particles)):
            if not again:
                # Those of an earlier fit do not belong to the scaling of this one.
                vars(self).pop("particles_", None)
            raise FloatingPointError(
                f"the particles became NaN or infinite with step_size={self.step_size}; try a smaller one."
            )
        self.particles_ = particles
        self.prior_weight_ = ensembles.chosen[index].prior_weight
        self.n_iter_ = ensembles.steps[index]
        if not again:
            self.spread_ = ensembles.spreads[index]
        tried = ensembles.scores[index]
        self.validation_scores_ = {
            "prior_weight": np.array([candidate.prior_weight for candidate in tried]),
            "share_of_steps": np.array([candidate.steps for candidate in tried]),
            "log_density": np.array(list(tried.values())),
        }

    def _predictive(self, location: Any = None, scale: Any = None) -> Predictive:
        particles = jax.tree.map(jnp.asarray, self.particles_)
        spread = self.spread_ if self._calibrates() else None
        return Predictive(self.network_, self.likelihood_, particles, location, scale, spread)

    def _map(self, function: Callable, X: Any) -> Any:
        """`function` of the predictive mixture of every row, in the units that the network sees."""
        rows = self._rows(X)
        values = self._predictive().map(function, rows)
        return jax.tree.map(lambda value: np.asarray(value, np.float64), values)

    def _rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "particles_")
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return standardised(X, self.input_mean_, self.input_scale_)

    def predict_dist(self, X: Any) -> Mixture:
        """p(y | x) for every row: the mixture over particles, a NumPyro distribution.

        It is computed in single precision, in standardised units; its numbers in the units of the targets are
        float64 of NumPy."""
        rows = self._rows(X)
        return self._predictive(*self._units())(rows)

    def __getstate__(self) -> dict[str, Any]:
        # The devices of a mesh belong to this process, and so do arrays of JAX, which not all can write.
        state = cast(dict, super().__getstate__()) | {"mesh": None}
        return state | _moved(np.asarray, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | _moved(jnp.asarray, state))

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write the fitted estimator to one file, for `mf.load`: see `mf.save`."""
        save(self, path, force=force)


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
    return {"settings": settings, "fitted": fitted}


def _require_units(name: str, mean: Any, scale: Any, shape: tuple[int, ...]) -> None:
    floats = all(isinstance(v, np.ndarray | np.generic) and v.dtype == np.float64 for v in (mean, scale))
    finite = floats and mean.shape == scale.shape == shape and np.isfinite([mean, scale]).all()
    message = f"{name}_mean_ and {name}_scale_ > 0 are not finite numbers of shape {shape}"
    require(finite and np.all(scale > 0), message)


def _require_sound(estimator: Any) -> None:
    """What `fit` would check, and that what was learned goes together: raises where a file says else."""
    estimator._check_settings()
    for name in ("early_stopping", "warm_start"):
        require(isinstance(getattr(estimator, name), bool | np.bool_), f"{name} is neither True nor False")
    hidden, seed = estimator.hidden, estimator.random_state
    require(isinstance(hidden, tuple | list | None) and len(hidden or ()) < 100, "hidden is not widths")
    Network.mlp(1, hidden or (), 1, estimator.activation)
    require(seed is None or require_count("random_state", seed, 0, "") < 2**32, "random_state is too large")
    for name in ("prior_weight_", "spread_"):
        positive_number(name, getattr(estimator, name), "")
    require_count("n_iter_", estimator.n_iter_, 0, "")
    require(_are_scores(estimator.validation_scores_), "validation_scores_ are no scores")
    features, names = estimator.n_features_in_, getattr(estimator, "feature_names_in_", None)
    require(type(features) is int and features > 0, "n_features_in_ is no number of features")
    _require_units("input", estimator.input_mean_, estimator.input_scale_, (features,))
    named = names is None or (isinstance(names, np.ndarray) and names.shape == (features,))
    require(named, "feature_names_in_ has not one name for each feature")
    estimator._require_targets()
    # Its numbers are the file's own: those of another version may be others.
    now, then = (_law(likelihood) for likelihood in (estimator._likelihood()[0], estimator.likelihood_))
    require(now == then, "likelihood_ is not that of the settings and the targets")
    inner = perceptron(estimator.network_)
    require(inner is not None and inner.sizes[0] == features, "network_ has not these features")
    leaves = jax.tree.leaves(estimator.particles_)
    finite = all(isinstance(leaf, np.ndarray) and np.isfinite(leaf).all() for leaf in leaves)
    require(finite, "particles_ are no finite numbers")
    require_sound(estimator._predictive(*estimator._units()))


def _are_scores(table: Any) -> bool:
    """One number of each kind for every candidate."""
    if not isinstance(table, dict) or set(table) != {"prior_weight", "share_of_steps", "log_density"}:
        return False
    columns = list(table.values())
    floats = all(isinstance(column, np.ndarray) and column.dtype == np.float64 for column in columns)
    return floats and len({column.shape for column in columns}) == 1 and columns[0].ndim == 1


def _law(likelihood: Any) -> tuple[Any, ...]:
    law = getattr(likelihood, "likelihood", likelihood)
    return type(likelihood), type(law), law.targets, law.width


def _in_files(kind: Any) -> Any:
    """Let files hold fitted estimators of this class."""

    def build(settings: dict[str, Any], fitted: dict[str, Any]) -> Any:
        estimator = kind(**settings)
        vars(estimator).update(fitted)
        return estimator

    return saved(kind, build=build, describe=_described, check=_require_sound)


@_in_files
class EnsembleRegressor(RegressorMixin, AbstractEnsemble):
    """Regression by an ensemble of networks that is a measure: predictions with honest uncertainty.

    `method` is DRLE (default), DRE, DLE, DE or FD-GVI. `likelihood` is heteroscedastic (noise that depends
    on the input; the default), homoscedastic or student_t; poisson or negative_binomial for counts.

    What is None goes by the data: `hidden` is (50,), or (100,) beyond 20,000 rows; `prior_weight`, in
    multiples of 1/n (1 is the Bayes posterior), is chosen by the predictive density of held-out rows, and
    with it `spread_`, a factor that widens or narrows the predictive law about its mean; `steps` and
    `batch_size` go by the number of rows. `activation` may join several with +: each gets its share of the
    hidden units. `mmd` is the weight of MMD² in multiples of J times the prior's, J the number of parameters:
    so the two stay in proportion. With `early_stopping`, a share of `validation_fraction` rows is
    held out and the best particles seen on it are kept. `warm_start` goes on from the particles of the last
    fit, and keeps its scaling, prior weight and spread. There is no `partial_fit`: the posterior's 1/n needs
    to know n. The particles are trained on the devices of a `mesh` with an axis "particles", if one is given;
    it is not pickled or saved.

    Fitted: `particles_`, `network_`, `likelihood_`, `prior_weight_`, `spread_`, `n_iter_` (steps taken), and
    `validation_scores_`: arrays `prior_weight`, `share_of_steps` and `log_density` with one entry for each
    candidate, the last its mean on held-out rows, in units of standardised targets; empty where none was
    chosen.
    """

    target_shape_: tuple[int, ...]
    target_mean_: np.ndarray
    target_scale_: np.ndarray

    def __init__(
        self,
        method: str = "DRLE",
        *,
        likelihood: str = "heteroscedastic",
        particles: int = 20,
        hidden: Sequence[int] | None = None,
        activation: str = "relu+tanh",
        prior_weight: float | None = None,
        mmd: float = 0.5,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float = 0.01,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
        mesh: Mesh | None = None,
    ):
        super().__init__(
            method,
            particles=particles,
            hidden=hidden,
            activation=activation,
            prior_weight=prior_weight,
            mmd=mmd,
            steps=steps,
            batch_size=batch_size,
            step_size=step_size,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
            mesh=mesh,
        )
        self.likelihood = likelihood

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean, and with `return_std` also the predictive standard deviation."""
        if not return_std:
            return self._in_units(self._map(_mean, X))
        mean, deviation = self._map(_mean_and_deviation, X)
        return self._in_units(mean), self._in_units(deviation, shifted=False)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the central interval that holds the target with probability `coverage`."""
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")
        # Of 1 − coverage, single precision keeps the digits that coverage has lost.
        tail = jnp.asarray((1 - float(coverage)) / 2, jnp.float32)
        low, high = self._map(eqx.Partial(_interval, tail), X)
        return self._in_units(low), self._in_units(high)

    def _validated(self, X: Any, y: Any, again: bool) -> tuple[np.ndarray, np.ndarray]:
        if self.likelihood not in (*_NOISE, *_COUNTS):
            known = ", ".join((*_NOISE, *_COUNTS))
            raise ValueError(f"likelihood must be one of {known}, got {self.likelihood!r}.")
        X, y = validate_data(self, X, y, reset=not again, dtype=np.float64, y_numeric=True, multi_output=True)
        y = np.asarray(y, np.float64)
        if again and y.shape[1:] != self.target_shape_:
            raise ValueError(
                f"y has shape {y.shape}, but the fit that warm_start goes on from had targets of shape "
                f"{self.target_shape_}; set warm_start=False."
            )
        if self.likelihood in _COUNTS and (np.any(y < 0) or np.any(y != np.round(y))):
            bad = y[(y < 0) | (y != np.round(y))].ravel()[0]
            raise ValueError(
                f"y must hold counts 0, 1, 2, … for likelihood={self.likelihood!r}, got {bad}; use another."
            )
        if self.likelihood in _COUNTS and np.max(y) > likelihoods.LARGEST_MEAN:
            raise ValueError(
                f"y holds {np.max(y):.3g}, but likelihood={self.likelihood!r} has means up to "
                f"{likelihoods.LARGEST_MEAN:.2g}; count in larger units, such as thousands, or use "
                "likelihood='heteroscedastic'."
            )
        return X, y

    def _set_targets(self, y: np.ndarray, weights: np.ndarray) -> None:
        self.target_shape_ = y.shape[1:]
        self.target_mean_, self.target_scale_ = moments("y", y, weights)

    def _require_targets(self) -> None:
        shape = self.target_shape_
        counts = isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)
        require(counts and len(shape) <= 1, "target_shape_ is no shape of targets")
        _require_units("target", self.target_mean_, self.target_scale_, shape)

    def _targets(self) -> int:
        return self.target_shape_[0] if self.target_shape_ else 1

    def _likelihood(self) -> tuple[Callable, int, int]:
        if self.likelihood in _COUNTS:
            law = _COUNTS[self.likelihood](targets=self._targets())
            shift = np.zeros(law.width, np.float32)
            shift[: self._targets()] = np.log(np.maximum(self.target_mean_, 1e-6))
            return Shifted(law, jnp.asarray(shift)), law.width, 0
        law = _NOISE[self.likelihood](targets=self._targets(), smallest_scale=_SMALLEST_SCALE)
        constants = law.constants * law.targets
        return law, law.width - constants, constants

    def _calibrates(self) -> bool:
        return self.likelihood not in _COUNTS

    def _units(self) -> tuple[Any, Any]:
        if self.likelihood in _COUNTS:
            return None, None
        location, scale = self.target_mean_, self.target_scale_
        return (location, scale) if self._targets() > 1 else (location.reshape(()), scale.reshape(()))

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        if self.likelihood not in _COUNTS:
            y = (y - self.target_mean_) / self.target_scale_
        return (y if self._targets() > 1 else y.reshape(len(y))).astype(np.float32)

    def _in_units(self, values: np.ndarray, shifted: bool = True) -> np.ndarray:
        """As the targets were given: in their columns, and in their units, which may need more digits than
        single precision has."""
        values = values.reshape(len(values), *self.target_shape_)
        if self.likelihood in _COUNTS:
            return values
        return self.target_scale_ * values + (self.target_mean_ if shifted else 0.0)


@_in_files
class EnsembleClassifier(ClassifierMixin, AbstractEnsemble):
    """Classification by an ensemble of networks that is a measure: probabilities that know what they do not.

    Settings and fitted names are those of `EnsembleRegressor`, without `likelihood`, which is categorical;
    and `classes_`. `predict_dist(X).mutual_information()` tells inputs on which the particles disagree. For
    classes of unequal weight, pass `fit` a `sample_weight`, as of
    `sklearn.utils.class_weight.compute_sample_weight`.
    """

    classes_: np.ndarray

    def __init__(
        self,
        method: str = "DRLE",
        *,
        particles: int = 20,
        hidden: Sequence[int] | None = None,
        activation: str = "relu+tanh",
        prior_weight: float | None = None,
        mmd: float = 0.5,
        steps: int | None = None,
        batch_size: int | None = None,
        step_size: float = 0.01,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
        mesh: Mesh | None = None,
    ):
        super().__init__(
            method,
            particles=particles,
            hidden=hidden,
            activation=activation,
            prior_weight=prior_weight,
            mmd=mmd,
            steps=steps,
            batch_size=batch_size,
            step_size=step_size,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
            mesh=mesh,
        )

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, in the order of `classes_`."""
        probabilities = self._map(_probabilities, X)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def _validated(self, X: Any, y: Any, again: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, reset=not again, dtype=np.float64)
        try:
            classes = np.unique(y)
        except TypeError:
            kinds = ", ".join(sorted({type(label).__name__ for label in y}))
            raise ValueError(
                f"y must hold labels of one type, got {kinds}; drop rows without a label, and turn the "
                "others into text with astype(str)."
            ) from None
        check_classification_targets(y)
        if len(classes) < 2:
            raise ValueError(f"y holds one class only, got {classes!r}; classification needs at least two.")
        if again and not np.isin(classes, self.classes_).all():
            raise ValueError(
                f"y has classes {classes!r}, the fit that warm_start goes on from {self.classes_!r}; set "
                "warm_start=False."
            )
        return X, y

    def _set_targets(self, y: np.ndarray, weights: np.ndarray) -> None:
        classes = np.unique(y)
        if len(classes) < 2:
            raise ValueError(
                f"sample_weight is 0 for every row but those of class {classes.tolist()[0]!r}, and "
                "classification needs two classes or more; give rows of another class a weight > 0."
            )
        self.classes_ = classes

    def _require_targets(self) -> None:
        one_each = (
            isinstance(self.classes_, np.ndarray) and self.classes_.ndim == 1 and len(self.classes_) > 1
        )
        sorted_once = one_each and np.array_equal(np.unique(self.classes_), self.classes_)
        require(sorted_once, "classes_ are no sorted classes")

    def _likelihood(self) -> tuple[Callable, int, int]:
        return likelihoods.Categorical(classes=len(self.classes_)), len(self.classes_), 0

    def _calibrates(self) -> bool:
        return False

    def _units(self) -> tuple[None, None]:
        return None, None

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.classes_, y).astype(np.int32)


@saved(check=lambda law: require(law.shift.shape == (law.likelihood.width,), "shift is not of the outputs"))
class Shifted(eqx.Module):
    """likelihood(outputs + shift): a network for counts starts from their mean."""

    likelihood: likelihoods.AbstractLikelihood
    shift: jax.Array

    def __call__(self, outputs: jax.Array) -> Distribution:
        return self.likelihood(outputs + self.shift)


def cross_validate(
    estimator: AbstractEnsemble,
    X: Any,
    y: Any,
    *,
    cv: Any = 5,
    sample_weight: Any = None,
    coverage: float = 0.9,
    return_estimator: bool = False,
) -> dict[str, Any]:
    """Fit the estimator on every split, all of them as one compiled program, and score it on what each
    leaves out.

    `cv` is a number of folds, a splitter of scikit-learn, or a list of (train, test) rows. Returned are
    arrays with one number per split: `negative_log_likelihood`, and for regression `root_mean_square_error`,
    `crps` (but not of counts), `coverage` and `width` of central intervals, for classification `accuracy`,
    `brier_score` and `expected_calibration_error`; and `estimator`, the fitted ones, if asked for.
    """
    if not isinstance(estimator, AbstractEnsemble):
        raise TypeError(
            f"estimator must be an EnsembleRegressor or EnsembleClassifier, got {type(estimator).__name__}; "
            "for others, pipelines included, use sklearn.model_selection.cross_validate."
        )
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be between 0 and 1, got {coverage}; 0.9 is usual.")
    X, y = (part if hasattr(part, "shape") else np.asarray(part) for part in (X, y))
    check_consistent_length(X, y, sample_weight)
    splitter: Any = check_cv(cv, y, classifier=is_classifier(estimator))
    splits = list(splitter.split(X, y))
    fitted = [cast(Any, clone(estimator)) for _ in splits]
    tables = []
    for one, (train, _) in zip(fitted, splits, strict=True):
        weight = None if sample_weight is None else np.asarray(sample_weight)[train]
        tables.append(one._prepare(_rows_of(X, train), _rows_of(y, train), weight))
    if is_classifier(estimator):
        _require_same_classes(fitted, [np.asarray(_rows_of(y, test)) for _, test in splits])
    for group, theirs in _alike(fitted, tables):
        group[0]._learn(group, theirs)
    rows = [
        _scores(one, _rows_of(X, test), np.asarray(_rows_of(y, test)), coverage)
        for one, (_, test) in zip(fitted, splits, strict=True)
    ]
    table: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return table | ({"estimator": fitted} if return_estimator else {})


def _require_same_classes(fitted: list[Any], tested: list[np.ndarray]) -> None:
    """Of all training rows, and of the rows that are to be scored."""
    if len({tuple(one.classes_) for one in fitted}) > 1:
        raise ValueError("cv gives splits whose training rows have different classes; stratify them.")
    for one, labels in zip(fitted, tested, strict=True):
        if not np.isin(labels, one.classes_).all():
            raise ValueError(
                f"cv gives a split whose test rows have classes {np.unique(labels)!r}, but its training rows "
                f"{one.classes_!r}; stratify it."
            )


def _alike(estimators: list[Any], tables: list[Table]) -> list[tuple[list[Any], list[Table]]]:
    """In groups that are one program: those with one network and one likelihood. Counts have likelihoods of
    their own, which start from the mean of their training rows."""
    groups: list[tuple[list[Any], list[Table]]] = []
    for one, table in zip(estimators, tables, strict=True):
        for group, theirs in groups:
            first = group[0]
            if eqx.tree_equal((first.network_, first.likelihood_), (one.network_, one.likelihood_)):
                group.append(one)
                theirs.append(table)
                break
        else:
            groups.append(([one], [table]))
    return groups


def _scores(estimator: Any, X: Any, y: np.ndarray, coverage: float) -> dict[str, float]:
    distribution = estimator.predict_dist(X)
    if is_classifier(estimator):
        labels, probabilities = np.searchsorted(estimator.classes_, y), estimator.predict_proba(X)
        return {
            "negative_log_likelihood": metrics.negative_log_likelihood(distribution, labels),
            "accuracy": metrics.accuracy(probabilities, labels),
            "brier_score": metrics.brier_score(probabilities, labels),
            "expected_calibration_error": metrics.expected_calibration_error(probabilities, labels),
        }
    low, high, y = *estimator.predict_interval(X, coverage), np.asarray(y, np.float64)
    targets = y.reshape(len(y), -1) if estimator._targets() > 1 else y.reshape(len(y))
    marginals = distribution if estimator._targets() == 1 else distribution.marginals
    scores = {
        "negative_log_likelihood": metrics.negative_log_likelihood(distribution, targets),
        "root_mean_square_error": metrics.root_mean_square_error(distribution, targets),
        "coverage": metrics.coverage(low, high, y),
        "width": metrics.width(low, high),
    }
    # It is an integral over numbers that counts skip.
    return scores if distribution.is_discrete else scores | {"crps": metrics.crps(marginals, targets)}


def _rows_of(table: Any, rows: np.ndarray) -> Any:
    return table.iloc[rows] if hasattr(table, "iloc") else table[rows]


def _held_out(table: Table, fraction: float, rng: np.random.RandomState) -> tuple[Table, Table]:
    """What is left to train on, and `fraction` of the rows."""
    rows = len(table.weights)
    number = max(round(fraction * rows), 1)
    if number >= rows:
        raise ValueError(
            f"validation_fraction={fraction} of {rows} rows leaves none to train on; try a smaller one."
        )
    order = rng.permutation(rows)
    return table.rows(order[number:]), table.rows(order[:number])


def _moved(place: Callable, state: dict[str, Any]) -> dict[str, Any]:
    """Network and likelihood of a fitted estimator, with the arrays of another library."""
    functions = {name: state[name] for name in ("network_", "likelihood_") if name in state}
    return jax.tree.map(lambda leaf: place(leaf) if eqx.is_array(leaf) else leaf, functions)


# Functions of a block's mixture: named, so that each is one program.


def _mean(mixture: Mixture) -> Any:
    return mixture.mean


def _mean_and_deviation(mixture: Mixture) -> Any:
    return mixture.mean, jnp.sqrt(mixture.variance)


def _interval(tail: jax.Array, mixture: Mixture) -> Any:
    return (mixture.marginals if mixture.event_shape else mixture).between_tails(tail)


def _probabilities(mixture: Mixture) -> Any:
    return mixture.probs
