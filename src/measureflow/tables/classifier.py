"""Classification: tables in, probabilities of classes out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from measureflow.networks.likelihoods import Categorical, Ordinal
from measureflow.networks.network import Network
from measureflow.prediction.arguments import require_coverage
from measureflow.prediction.predictive import Mixture
from measureflow.prediction.sets import smallest_sets
from measureflow.saving.registry import require
from measureflow.tables.choosing import TEMPERATURES
from measureflow.tables.ensemble import AbstractEnsemble
from measureflow.tables.in_files import in_files
from measureflow.tables.inputs import checked
from measureflow.tables.methods import Method
from measureflow.tables.models import Model, Shape, default_shapes
from measureflow.tables.targets import Head, TargetUnits


@in_files
class EnsembleClassifier(ClassifierMixin, AbstractEnsemble):
    """Classification by an ensemble of networks that is a measure: probabilities that know what they do not.

    `predict_dist(X).mutual_information()` tells inputs on which the particles disagree. Fits that have not
    converged are told as in `EnsembleRegressor`.

    Parameters
    ----------
    method : str or Method
        "DRLE" (default), "DRE", "DLE", "DE", "FD-GVI" or "PrO", or an `mf.Method` of your own; "posterior" as
        in `EnsembleRegressor`.
    particles : int
        How many networks.
    hidden : sequence of int, optional
        Widths of the hidden layers. None goes by the number of rows: four layers of 16 below 300, three of
        32, or three of 64 from 5,000 on; one of 50 where rows are too few to hold some out, below 50.
    encoding : int, optional
        Into how many piecewise-linear bins a column of numbers is cut, for networks to see in its place; 0 is
        none. None lets held-out rows choose which networks see bins (8, or 16 from 1,000 rows
        on), and which the columns.
    activation : str, optional
        Several may be joined with +: each gets its share of the hidden units. None is "relu+tanh", and with
        several layers "silu+tanh+identity": smooth functions, which can pass on what they are given.
    class_weight : dict or "balanced", optional
        A factor for the weight of a row by its class, for classes that matter more than they are frequent;
        "balanced" makes all weigh the same. Probabilities are then those of a world in which classes have
        these weights. None leaves classes as frequent as they are, and probabilities as they should be.
    ordinal : bool or sequence of labels
        Whether classes have an order, that of `sorted`, as ratings do; or the labels in their order, such as
        ["low", "medium", "high"]. Networks then predict one score, and the cutpoints between classes are
        learned constants: P(y ≤ k) = 1/(1 + exp(score − c_k)), as in `mf.likelihoods.Ordinal`. Labels that y
        does not have are left out. `classes_`, and so the columns of probabilities, are sorted all the same.
    prior_weight : float, optional
        In multiples of 1/n: 1 is the Bayes posterior, smaller is colder. None lets held-out rows choose one
        or several, by the predictive probability of the ensemble.
    mmd : float
        The weight of MMD² in multiples of J times the prior's, J the number of parameters: so the two stay
        in proportion.
    steps : int, optional
        By default 40 a row up to 2,000, at least 800, then 2 a row up to 60,000; fewer for networks of more
        than 20,000 parameters.
    batch_size : int, optional
        50 rows, or 100 of 2,000 and more.
    step_size : float
        Of the first step; it falls to 0 along a cosine.
    early_stopping : bool
        Whether to hold rows out and keep the particles that did best on them.
    validation_fraction : float
        The share of rows that `early_stopping` holds out.
    warm_start : bool
        Whether a fit goes on from the particles of the last one; it keeps scaling and prior weight.
    random_state : int, RandomState or None
        An integer makes a fit reproducible.
    verbose : int
        1 shows progress on stderr, and how long it will take.
    members : dict of arrays, optional
        How each network is trained, as `members_` of another fit has it; with `hidden`, `encoding` and
        `likelihood` nothing is chosen then. None lets held-out rows choose.
    mesh : jax.sharding.Mesh, optional
        Devices with an axis "particles", over which the particles are cut. It is not pickled or saved.

    Attributes
    ----------
    classes_ : array
        The labels, sorted.
    particles_ : pytree of arrays
        The networks' parameters, with a leading axis for the particles.
    network_ : Network
        θ, rows ↦ logits.
    likelihood_ : callable
        Logits ↦ distribution of the class.
    shape_ : Shape
        The hidden layers, the bins and the likelihood, as given or chosen.
    encoding_ : PiecewiseLinear or None
        The bins of the columns.
    prior_weight_ : float
        As given, or of most networks.
    members_ : dict of arrays
        How each network was trained: its `prior_weight`, its `share_of_steps`, whether it sees bins,
        `binned`, and whether it is `linear` in what it sees. An ensemble of 20 has four parts of five, each
        trained by one of the candidates: those under whose mixture held-out rows have the highest log score.
    spread_ : float
        The temperature of the classes, by which held-out rows correct how sure the networks are: above 1 less
        sure, below 1 surer; 1 where nothing was chosen. `spread_power_` and `typical_deviation_` are 1.
    n_iter_ : int
        The steps that the particles took.
    history_ : History
        Of the final training, at some fifty steps, as in `EnsembleRegressor`.
    validation_scores_ : dict of arrays
        `model`, `prior_weight`, `share_of_steps`, `binned`, `linear`, `smoothed`, `log_density`, the mean
        held-out log probability, and `share` of each candidate, as in `EnsembleRegressor`.
    certificate_ : Verdict or None
        As in `EnsembleRegressor`.
    input_mean_, input_scale_ : array
        Scaling.
    n_features_in_, feature_names_in_ : int, array of str
        The columns of X, and their names if they have any.
    columns_ : Columns or None
        How the columns of a frame become numbers, named in `columns_.names`; None where X was an array.
    """

    classes_: np.ndarray

    def __init__(
        self,
        method: str | Method = "DRLE",
        *,
        particles: int = 20,
        hidden: Sequence[int] | None = None,
        encoding: int | None = None,
        activation: str | None = None,
        class_weight: dict | str | None = None,
        ordinal: bool | Sequence[Any] = False,
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
        members: dict[str, np.ndarray] | None = None,
        mesh: Mesh | None = None,
    ):
        super().__init__(
            method,
            particles=particles,
            hidden=hidden,
            encoding=encoding,
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
            members=members,
            mesh=mesh,
        )
        self.class_weight = class_weight
        self.ordinal = ordinal

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, in the order of `classes_`."""
        probabilities = self._map(_probabilities, X)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict_set(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """The smallest set of classes that holds the right one with probability `coverage`: a table of True
        and False, with a row for each of X and a column for each of `classes_`. For sets whose coverage is
        guaranteed, see `mf.Conformal`."""
        require_coverage(coverage)
        return smallest_sets(self.predict_proba(X), float(coverage))

    def _reweighted(self, weights: np.ndarray, y: np.ndarray) -> np.ndarray:
        if self.class_weight is None:
            return weights
        return weights * compute_sample_weight(self.class_weight, y)

    def _validated(self, X: Any, y: Any, again: bool) -> tuple[Any, np.ndarray]:
        X, y = checked(self, X, y, again)
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
        order_of(self.ordinal, classes)

    def _require_targets(self) -> None:
        one_each = (
            isinstance(self.classes_, np.ndarray) and self.classes_.ndim == 1 and len(self.classes_) > 1
        )
        sorted_once = one_each and np.array_equal(np.unique(self.classes_), self.classes_)
        require(sorted_once, "classes_ are no sorted classes")

    def _shapes(self, y: np.ndarray, weights: np.ndarray, columns: int) -> tuple[Shape, ...]:
        return default_shapes(self._rows_to_choose_by(y), columns, (None,))

    def _spreads(self, network: Network, likelihood: Callable) -> np.ndarray:
        return TEMPERATURES

    def _units_for(self, likelihood: Any, y: np.ndarray, weights: np.ndarray) -> None:
        return None

    def _target_units(self) -> None:
        return None

    def _head(self, likelihood: Any, units: TargetUnits | None) -> Head:
        number = len(self.classes_)
        if self.ordinal is False:
            return Head(Categorical(classes=number), number)
        law = Ordinal(classes=number, order=order_of(self.ordinal, self.classes_))
        return Head(law, 1, law.constants)

    def _checked(self, y: np.ndarray, models: tuple[Model, ...]) -> np.ndarray:
        return np.searchsorted(self.classes_, y).astype(np.int32)

    def _seen(self, model: Model, units: TargetUnits | None, y: np.ndarray, weights: np.ndarray) -> Model:
        return model


def order_of(ordinal: Any, classes: np.ndarray) -> tuple[int, ...] | None:
    """The numbers of sorted classes in the order that `ordinal` says; None where that is their own."""
    if isinstance(ordinal, bool):
        return None
    if isinstance(ordinal, str) or not isinstance(ordinal, Sequence | np.ndarray):
        raise TypeError(
            f"ordinal must be True, False or the labels in their order, got {ordinal!r}; for example "
            'ordinal=["low", "medium", "high"].'
        )
    known, labels = classes.tolist(), np.asarray(ordinal).tolist()
    if len(set(labels)) < len(labels):
        raise ValueError(f"ordinal names a label twice, got {ordinal!r}; name each once.")
    if missing := [label for label in known if label not in labels]:
        raise ValueError(
            f"ordinal does not name {missing[0]!r}, which is a label of y, got {ordinal!r}; name all labels, "
            "from the lowest to the highest."
        )
    return tuple(known.index(label) for label in labels if label in known)


def _probabilities(mixture: Mixture) -> Any:
    return mixture.probs
