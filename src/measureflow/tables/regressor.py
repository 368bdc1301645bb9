"""Regression: tables in, distributions of numbers out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from sklearn.base import RegressorMixin
from sklearn.utils import Tags

from measureflow.core.validation import positive_number
from measureflow.networks.censoring import CensoredLikelihood
from measureflow.networks.likelihoods import AbstractLikelihood
from measureflow.networks.network import Network
from measureflow.prediction.arguments import require_coverage
from measureflow.prediction.censoring import are_known, bounds_of, points_of
from measureflow.prediction.predictive import Mixture, YeoJohnson
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.driver import Callback
from measureflow.saving.registry import require
from measureflow.tables.censoring import OF_BOUNDS, Bounds, censored
from measureflow.tables.choosing import NO_SPREADS, SPREADS
from measureflow.tables.ensemble import AbstractEnsemble
from measureflow.tables.in_files import in_files, require_units
from measureflow.tables.inputs import checked
from measureflow.tables.methods import Method
from measureflow.tables.models import Model, Shape, default_shapes
from measureflow.tables.reading import targets_of
from measureflow.tables.scaling import moments
from measureflow.tables.tails import mean_of, moments_of, warn_of_tails
from measureflow.tables.targets import (
    Head,
    TargetUnits,
    changes_units,
    head_for,
    is_of_logarithms,
    is_of_powers,
    law_of,
    likelihoods_for,
    require_support,
)
from measureflow.tables.training import Ensemble


@in_files
class EnsembleRegressor(RegressorMixin, AbstractEnsemble):
    """Regression by an ensemble of networks that is a measure: predictions with honest uncertainty.

    There is no `partial_fit`: the posterior's 1/n needs to know n.

    A fit that has not converged says so with scikit-learn's ConvergenceWarning: where the loss fell, from a
    quarter of the steps to half of them, by more than a quarter of all that the ensemble learned; after that
    the step size is annealed, and all runs come to rest.

    Parameters
    ----------
    method : str or Method
        "DRLE" (default), "DRE", "DLE", "DE", "FD-GVI" or "PrO", or an `mf.Method` of your own. "posterior"
        draws networks from the posterior with `mf.sample`, for small tables: `certificate_` says whether they
        can be trusted to be such draws.
    likelihood : str, AbstractLikelihood or tuple, optional
        "heteroscedastic" (one Normal, whose noise depends on the input), "mixture" (five of them: any shape),
        "homoscedastic" or "student_t"; "log_normal" and "log_mixture" for numbers > 0, laws of their
        logarithm; "yeo_johnson_normal" and "yeo_johnson_mixture" for skewed numbers of any sign, laws of
        their power transform (Yeo and Johnson, 2000); "poisson", "negative_binomial", "zero_inflated" or
        "hurdle" for counts; "gamma" for numbers > 0 with noise in proportion, "beta" for numbers between 0
        and 1. Or one of `mf.likelihoods`, or a pair of a function outputs ↦ NumPyro distribution and the
        number of outputs that it reads. Targets are standardised for laws that are Normal, Student's or
        mixtures of Normals, and left as they are for others. None is "mixture", or "log_mixture" where log y
        is much nearer to a Normal law than y; for what looks like counts held-out rows choose between that
        and "negative_binomial", for numbers between 0 and 1 between that and "beta". With fewer than 50 rows
        it is "heteroscedastic".
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
    prior_weight : float, optional
        In multiples of 1/n: 1 is the Bayes posterior, smaller is colder. None lets held-out rows choose one
        or several, by the predictive density of the ensemble, and `spread_` with them.
    mmd : float
        The weight of MMD² in multiples of J times the prior's, J the number of parameters: so the two stay
        in proportion.
    steps : int, optional
        By default 40 a row up to 10,000, at least 4,000, then 20 a row up to 60,000; two fifths of that for
        networks with bins or several layers, twice these where targets have little noise, a quarter where
        they are mostly noise, half of these for 20,000 rows and more, and fewer for networks of more than
        20,000 parameters.
    batch_size : int, optional
        50 rows, or 100 of 2,000 and more, or 500 of 20,000 and more for networks with bins or several
        layers.
    step_size : float
        Of the first step; it falls to 0 along a cosine.
    early_stopping : bool
        Whether to hold rows out and keep the particles that did best on them.
    validation_fraction : float
        The share of rows that `early_stopping` holds out.
    warm_start : bool
        Whether a fit goes on from the particles of the last one; it keeps scaling, prior weight and spread.
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
    particles_ : pytree of arrays
        The networks' parameters, with a leading axis for the particles.
    network_ : Network
        θ, rows ↦ outputs.
    likelihood_ : callable
        Outputs ↦ distribution of the target.
    shape_ : Shape
        The hidden layers, the bins and the likelihood, as given or chosen.
    encoding_ : PiecewiseLinear or None
        The bins of the columns.
    smoother_ : Smoother or None
        The Gaussian process whose mean and deviation some networks see beside the columns, where held-out
        rows chose such networks, on tables of 50 to 1,500 rows.
    prior_weight_ : float
        As given, or of most networks.
    members_ : dict of arrays
        How each network was trained: its `prior_weight`, its `share_of_steps`, whether it sees bins,
        `binned`, whether it is `linear` in what it sees, and whether it sees `smoother_`, too, `smoothed`. An
        ensemble of 20 has four parts of five, each
        trained by one of the candidates: those under whose mixture held-out rows have the highest log score.
    spread_ : float
        A factor that widens or narrows the predictive law about its median; 1 where nothing was chosen.
    spread_power_, typical_deviation_ : float
        With a power p < 1 the factor depends on the deviation s of a row's law, as (s/typical)^(p − 1): see
        `mf.Spread`. 1 where nothing was chosen.
    censored_ : bool
        Whether some targets of the fit were bounds.
    smallest_scale_ : float
        The smallest scale of the likelihood, in units of standardised targets: 0.001, or what the rounding of
        y allows.
    target_log_ : bool
        Whether the network sees log y; then `target_mean_` and `target_scale_` are of log y.
    target_transform_ : YeoJohnson or None
        What the network sees of y under a law of that name; then `target_mean_` and `target_scale_` are of
        that.
    n_iter_ : int
        The steps that the particles took.
    history_ : History
        Of the final training, at some fifty steps: `loss` (mean negative log-likelihood of the training rows
        over particles), `mixture_loss` (that of their mixture), `gradient_norm`, and more; on all rows, or on
        2,000 that lie evenly.
    validation_scores_ : dict of arrays
        `model`, `prior_weight`, `share_of_steps`, `binned`, `linear`, `smoothed`, `log_density` and `share`,
        with one entry for each candidate: the mean log density of held-out rows, in units of standardised
        targets, at the spread that suits it, and its share of the ensemble; empty where nothing was chosen.
    certificate_ : Verdict or None
        With method="posterior": whether the sampler's draws are certified, and what speaks against them.
    input_mean_, input_scale_, target_mean_, target_scale_ : array
        Scaling.
    target_shape_ : tuple
        The shape of one row's targets.
    n_features_in_, feature_names_in_ : int, array of str
        The columns of X, and their names if they have any.
    columns_ : Columns or None
        How the columns of a frame become numbers, named in `columns_.names`; None where X was an array.
    """

    target_shape_: tuple[int, ...]
    target_mean_: np.ndarray
    target_scale_: np.ndarray
    target_log_: bool
    target_transform_: YeoJohnson | None = None
    censored_: bool = False
    smallest_scale_: float

    def __init__(
        self,
        method: str | Method = "DRLE",
        *,
        likelihood: str | AbstractLikelihood | tuple[Callable, int] | None = None,
        particles: int = 20,
        hidden: Sequence[int] | None = None,
        encoding: int | None = None,
        activation: str | None = None,
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
        self.likelihood = likelihood

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        censoring: Any = None,
        callback: Callback | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> "EnsembleRegressor":
        """Learn from rows X and targets y. A fit that fails leaves the estimator as it was.

        Ctrl-C or SIGTERM in the final training keeps the model as far as it came, with a ConvergenceWarning;
        before that, while model and prior's weight are chosen, there is nothing to keep, and
        KeyboardInterrupt is raised. A second Ctrl-C stops at once.

        Parameters
        ----------
        X, y
            Rows, and a target for each.
        sample_weight
            A row of weight k counts as k equal rows.
        censoring
            For targets of which only a bound is known, as of what had not failed when it was last looked at:
            for each row 1 where the target is larger than y, −1 where it is smaller, 0 where it is y. Or
            "interval", with lower and upper bounds as two columns of y, equal where the target is known,
            infinite where there is no bound. Such rows count with log P(Y > y), for example, in place of
            log p(y), also where rows are held out to choose by. It needs a law that is Normal or a mixture of
            Normals, of y or of log y.
        callback
            A function of (step, record, state), called between compiled calls of the final training: the
            newest record of `history_`, and the state of the flow; where the ensemble has parts, those of its
            parts, along a first axis. A true answer ends training there.
        checkpoint
            With one, the same call resumes a fit that was cut off: what was chosen is stored with the first
            checkpoint, at step 0 of the final training, and not chosen again. A fit of other data or settings
            is refused. It needs a `random_state`, which makes two calls the same.
        """
        targets = y if censoring is None else Bounds(bounds_of(targets_of(y), censoring))
        return super().fit(X, targets, sample_weight, callback=callback, checkpoint=checkpoint)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean, and with `return_std` also the predictive standard deviation."""
        found = self._map(moments_of if return_std else mean_of, X)
        mean = self._in_units(found.mean)
        warn_of_tails(found, mean)
        return (mean, self._in_units(found.deviation, shifted=False)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the central interval that holds the target with probability `coverage`."""
        require_coverage(coverage)
        # Of 1 − coverage, single precision keeps the digits that coverage has lost.
        tail = jnp.asarray((1 - float(coverage)) / 2, jnp.float32)
        low, high = self._map(eqx.Partial(_interval, tail), X)
        return self._in_units(low), self._in_units(high)

    def _validated(self, X: Any, y: Any, again: bool) -> tuple[Any, np.ndarray]:
        # Where all bounds are numbers, these are targets like others.
        self.censored_ = isinstance(y, Bounds) and not bool(are_known(y.bounds).all())
        bounds = y.bounds if isinstance(y, Bounds) else None
        y = y if bounds is None else points_of(bounds)
        X, y = checked(self, X, y, again, y_numeric=True, multi_output=True)
        y = np.asarray(y, np.float64)
        if again and y.shape[1:] != self.target_shape_:
            raise ValueError(
                f"y has shape {y.shape}, but the fit that warm_start goes on from had targets of shape "
                f"{self.target_shape_}; set warm_start=False."
            )
        return X, y if bounds is None or not self.censored_ else bounds

    def _points(self, y: np.ndarray) -> np.ndarray:
        return points_of(y) if self.censored_ else y

    def _set_targets(self, y: np.ndarray, weights: np.ndarray) -> None:
        self.target_shape_ = self._points(y).shape[1:]

    def _require_targets(self) -> None:
        shape = self.target_shape_
        counts = isinstance(shape, tuple) and all(type(size) is int and size > 0 for size in shape)
        require(counts and len(shape) <= 1, "target_shape_ is no shape of targets")
        require_units("target", self.target_mean_, self.target_scale_, shape)
        positive_number("smallest_scale_", self.smallest_scale_, "")
        is_log = is_of_logarithms(getattr(self.shape_, "likelihood", None))
        require(self.target_log_ is is_log, "target_log_ is not that of the likelihood")
        bent = is_of_powers(getattr(self.shape_, "likelihood", None))
        sound = isinstance(self.target_transform_, YeoJohnson) if bent else self.target_transform_ is None
        require(sound, "target_transform_ is not that of the likelihood")
        require(isinstance(self.censored_, bool), "censored_ is neither True nor False")

    def _targets(self) -> int:
        return self.target_shape_[0] if self.target_shape_ else 1

    def _shapes(self, y: np.ndarray, weights: np.ndarray, columns: int) -> tuple[Shape, ...]:
        laws = (self.likelihood,)
        if self.likelihood is None:
            laws = likelihoods_for(self._points(y), weights)
            laws = tuple(law for law in laws if law in OF_BOUNDS) if self.censored_ else laws
        return default_shapes(self._rows_to_choose_by(y), columns, laws)

    def _spreads(self, network: Network, likelihood: Callable) -> np.ndarray:
        return SPREADS if changes_units(network, likelihood) else NO_SPREADS

    def _may_smooth(self, inputs: np.ndarray, network: Network, likelihood: Callable) -> bool:
        # Of bounds nothing is known by how smooth they are.
        one = changes_units(network, likelihood) and self._targets() == 1 and not self.censored_
        return one and super()._may_smooth(inputs, network, likelihood)

    def _sees_logarithms(self) -> bool:
        return self.target_log_

    def _transform(self) -> YeoJohnson | None:
        return self.target_transform_

    def _has_units(self) -> bool:
        """Whether targets are standardised."""
        return changes_units(self.network_, self.likelihood_)

    def _units_for(self, likelihood: Any, y: np.ndarray, weights: np.ndarray) -> TargetUnits:
        known = are_known(y) if self.censored_ else None
        return TargetUnits.of(likelihood, self._points(y), weights, known)

    def _target_units(self) -> TargetUnits:
        units = (self.target_mean_, self.target_scale_, self.smallest_scale_)
        return TargetUnits(*units, self.target_log_, self.target_transform_)

    def _head(self, likelihood: Any, units: TargetUnits) -> Head:
        return head_for(likelihood, self._targets(), units.mean, units.floor, units.bounds, units.ceiling)

    def _units(self) -> tuple[Any, Any]:
        if not self._has_units():
            return None, None
        location, scale = self.target_mean_, self.target_scale_
        return (location, scale) if self._targets() > 1 else (location.reshape(()), scale.reshape(()))

    def _checked(self, y: np.ndarray, models: tuple[Model, ...]) -> np.ndarray:
        for model in models:
            law = law_of(model.loss.network, model.loss.likelihood)
            require_support(law, y, model.shape.likelihood)
        return y if self._targets() > 1 or self.censored_ else y.reshape(len(y))

    def _seen(self, model: Model, units: TargetUnits, y: np.ndarray, weights: np.ndarray) -> Model:
        if self.censored_:
            model = censored(model)
        if changes_units(model.loss.network, model.loss.likelihood) and not units.bends:
            return model._replace(units=units, targets=units.standardised)
        # Held-out densities are compared as those of standardised targets, whose rows have weights.
        scale = moments("y", self._points(y), weights)[1]
        volume = functools.partial(_log_volume, units if units.bends else None, float(np.sum(np.log(scale))))
        targets = units.standardised if units.bends else _single
        return model._replace(units=units, targets=targets, log_volume=volume)

    def _take(self, found: Ensemble, models: tuple[Model, ...]) -> None:
        super()._take(found, models)
        if isinstance(self.likelihood_, CensoredLikelihood):
            self.likelihood_ = self.likelihood_.likelihood
        units = models[found.choice.model].units
        self.target_mean_, self.target_scale_ = units.mean, units.scale
        self.smallest_scale_, self.target_log_ = units.floor, units.log
        self.target_transform_ = units.transform

    def _in_units(self, values: np.ndarray, shifted: bool = True) -> np.ndarray:
        """As the targets were given: in their columns, and in their units, which may need more digits than
        single precision has."""
        values = values.reshape(len(values), *self.target_shape_)
        if not self._has_units():
            return values
        if self.target_log_:
            # Exponentials of what the network sees, times its scale: all but the mean of log y is there.
            return np.exp(self.target_mean_) * values
        if self.target_transform_ is not None:
            location, scale = self.target_transform_.location, self.target_transform_.scale
            return np.asarray(scale * values + (location if shifted else 0.0))
        return self.target_scale_ * values + (self.target_mean_ if shifted else 0.0)


def _single(y: np.ndarray) -> np.ndarray:
    return y.astype(np.float32)


def _log_volume(units: TargetUnits | None, volume: float, y: np.ndarray) -> np.ndarray:
    """log |dz/dy|, z as the network sees it, and y in standard deviations. Of bounds there are probabilities,
    which have no units."""
    if y.ndim == 2 and units is not None:
        return np.where(are_known(y), _log_volume(units, volume, points_of(y)), 0.0)
    return volume + (np.zeros(len(y)) if units is None else units.log_volume(y))


# Functions of a block's mixture: named, so that each is one program.


def _interval(tail: jax.Array, mixture: Mixture) -> Any:
    return (mixture.marginals if mixture.event_shape else mixture).between_tails(tail)
