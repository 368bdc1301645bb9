"""What scikit-learn's estimators around the recipe share: settings, scaling, and the fit. No mathematics
here."""

import abc
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import _check_sample_weight

from measureflow.core.compiled import keep_programs
from measureflow.core.pytrees import dimension
from measureflow.core.warned import at_the_users_line
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.runs.checkpoint import Checkpoint
from measureflow.runs.driver import Callback, require_callback
from measureflow.tables.choosing import Choice
from measureflow.tables.convergence import not_converged
from measureflow.tables.encoding import PiecewiseLinear, can_be_cut
from measureflow.tables.fitted import AbstractFitted
from measureflow.tables.frames import Columns
from measureflow.tables.inputs import require_mass, scaling
from measureflow.tables.members import members_of, most_frequent, parts_given, scores_of, sees_smoother
from measureflow.tables.methods import Method, method_of
from measureflow.tables.models import (
    Model,
    Shape,
    given,
    require_encoding,
    require_hidden,
    require_smoothness,
)
from measureflow.tables.posterior import drawn_for, is_sampled, require_sampled
from measureflow.tables.reading import is_frame
from measureflow.tables.recipe import LONGEST, TRIAL_SHARE, Recipe, batch_size_for, steps_for, trial_steps_for
from measureflow.tables.scaling import standardised
from measureflow.tables.settings import check_settings, require_resumable, require_unchanged
from measureflow.tables.smoother import WIDTH
from measureflow.tables.smoothness import may_smooth, require_rows
from measureflow.tables.table import Table, rows_of
from measureflow.tables.targets import Head
from measureflow.tables.training import Ensemble, Ensembles, Trainer
from measureflow.tables.views import View

Own = TypeVar("Own", bound="AbstractEnsemble")


class Prepared(NamedTuple):
    """A table, and the models that it may choose from."""

    table: Table
    models: tuple[Model, ...]


class AbstractEnsemble(AbstractFitted):
    """What both estimators have."""

    def __init__(
        self,
        method: str | Method = "DRLE",
        *,
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
        self.method = method
        self.particles = particles
        self.hidden = hidden
        self.encoding = encoding
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
        self.members = members
        self.mesh = mesh

    def fit(
        self: Own,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        callback: Callback | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Own:
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
        callback
            A function of (step, record, state), called between compiled calls of the final training: the
            newest record of `history_`, and the state of the flow; where the ensemble has parts, those of its
            parts, along a first axis. A true answer ends training there.
        checkpoint
            With one, the same call resumes a fit that was cut off: what was chosen is stored with the first
            checkpoint, at step 0 of the final training, and not chosen again. A fit of other data or settings
            is refused. It needs a `random_state`, which makes two calls the same.
        """
        callbacks = require_callback(callback)
        require_resumable(checkpoint, self.random_state)
        before, goes_on = dict(vars(self)), self._goes_on()
        try:
            prepared = self._prepare(X, y, sample_weight)
            found = self._learn([self], [prepared], callbacks, checkpoint)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        # A warm start goes on from a fit that was looked at.
        if found.interrupted or not goes_on:
            complaint = self._complaint(found, 0)
            if complaint is not None:
                warnings.warn(complaint, ConvergenceWarning, stacklevel=at_the_users_line())
        return self

    def _complaint(self, found: Ensembles, index: int) -> str | None:
        """What there is to say about convergence. Early stopping asks held-out rows, and who stops a fit by a
        callback has reasons."""
        mine = found.of_tables[index]
        if self.certificate_ is not None:
            return None if self.certificate_ else str(self.certificate_)
        if found.interrupted:
            return (
                f"{found.interrupted} at step {self.n_iter_} of {mine.planned}: the model is the one of that "
                "step, and has not converged; fit again, with checkpoint=mf.Checkpoint(folder) to go on from "
                "where a fit was stopped."
            )
        if self.early_stopping or mine.steps < mine.planned:
            return None
        stopped_early = max(trial.candidate.steps for trial in mine.choice.parts) < 1
        return not_converged(self.history_, stopped_early=stopped_early)

    def _prepare(self, X: Any, y: Any, sample_weight: Any) -> "Prepared":
        """Check everything, learn the scaling, build the models; the standardised table."""
        check_settings(self)
        again = self._goes_on()
        X, y = self._validated(X, y, again)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weights = require_mass(self._reweighted(weights, y))
        chosen = np.flatnonzero(weights > 0)
        X, y, weights = rows_of(X, chosen), y[chosen], weights[chosen]
        if not again:
            self.columns_ = Columns.learn(X) if is_frame(X) else None
        if self.columns_ is not None:
            X = self.columns_.numbers(X)
        if again:
            require_unchanged(self)
        else:
            self.input_mean_, self.input_scale_ = scaling(self, X, self._points(y), weights)
            self._set_targets(y, weights)
        inputs = standardised(X, self.input_mean_, self.input_scale_)
        models = (self._last_model(y, weights),) if again else self._models(inputs, y, weights)
        return Prepared(Table.of(inputs, self._checked(y, models), weights), models)

    def _goes_on(self) -> bool:
        """Whether a fit continues the one before."""
        return self.warm_start and hasattr(self, "particles_")

    @abc.abstractmethod
    def _validated(self, X: Any, y: Any, again: bool) -> tuple[Any, np.ndarray]:
        """Rows and targets, checked; frames as they are; `again` against what a warm start goes on from."""

    def _points(self, y: np.ndarray) -> np.ndarray:
        """A target for every row, where some are known by bounds only."""
        return y

    def _reweighted(self, weights: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Weights of rows, by what their targets count for."""
        return weights

    @abc.abstractmethod
    def _set_targets(self, y: np.ndarray, weights: np.ndarray) -> None:
        """Learn what the targets are: their scale, or their classes."""

    @abc.abstractmethod
    def _shapes(self, y: np.ndarray, weights: np.ndarray, columns: int) -> tuple[Shape, ...]:
        """What held-out rows may choose from, where so many columns can be cut into bins."""

    def _rows_to_choose_by(self, y: np.ndarray) -> int:
        """Draws of a posterior are not chosen among: they have the network and the law of few rows."""
        return 0 if is_sampled(self.method) else len(y)

    @abc.abstractmethod
    def _units_for(self, likelihood: Any, y: np.ndarray, weights: np.ndarray) -> Any:
        """How a law sees targets; None for classes."""

    @abc.abstractmethod
    def _target_units(self) -> Any:
        """How the law of the last fit sees targets."""

    @abc.abstractmethod
    def _head(self, likelihood: Any, units: Any) -> Head:
        """The likelihood, the network's outputs, and how many constants follow them."""

    @abc.abstractmethod
    def _checked(self, y: np.ndarray, models: "tuple[Model, ...]") -> np.ndarray:
        """Targets that every model can see: as they are, or numbers of classes."""

    @abc.abstractmethod
    def _seen(self, model: Model, units: Any, y: np.ndarray, weights: np.ndarray) -> Model:
        """With what it makes of targets."""

    def _models(self, inputs: np.ndarray, y: np.ndarray, weights: np.ndarray) -> "tuple[Model, ...]":
        """Those that held-out rows may choose from, the simplest first."""
        hidden, encoding = require_hidden(self.hidden), require_encoding(self.encoding)
        columns = int(can_be_cut(inputs).sum())
        shapes = given(self._shapes(y, weights, columns), hidden=hidden, encoding=encoding)
        bins = {shape.encoding for shape in shapes} - {0}
        encodings = {number: PiecewiseLinear.learn(inputs, number) for number in bins}
        models = []
        for shape in shapes:
            encoding, units = encodings.get(shape.encoding), self._units_for(shape.likelihood, y, weights)
            head = self._head(shape.likelihood, units)
            features = inputs.shape[1] if encoding is None else encoding.width
            plain = self._network(shape, head, features)
            smoothed = self._may_smooth(inputs, plain, head.likelihood)
            network = self._network(shape, head, features + WIDTH) if smoothed else plain
            model = self._model(shape, network, head.likelihood, encoding, len(inputs), smoothed)
            models.append(self._seen(model._replace(plain=plain), units, y, weights))
        return tuple(models)

    def _network(self, shape: Shape, head: Head, features: int) -> Network:
        activation = shape.activation if self.activation is None else self.activation
        skip = shape.skip and not is_sampled(self.method)
        network = Network.mlp(features, shape.hidden, head.outputs, activation, skip=skip)
        return network.with_constants(head.constants) if head.constants else network

    def _may_smooth(self, inputs: np.ndarray, network: Network, likelihood: Callable) -> bool:
        """Whether networks may see a smoother, of targets that are numbers: those that `members` say so do,
        and where all is chosen, those that held-out rows choose."""
        if is_classifier(self):
            return False
        if self.members is not None:
            return sees_smoother(self.members)
        return self.encoding is None and not is_sampled(self.method) and may_smooth(*inputs.shape)

    def _last_model(self, y: np.ndarray, weights: np.ndarray) -> Model:
        """That of the fit that a warm start goes on from."""
        smoothed = self.smoother_ is not None
        model = self._model(self.shape_, self.network_, self.likelihood_, self.encoding_, len(y), smoothed)
        return self._seen(model, self._target_units(), y, weights)

    def _given(self, tables: list[Table], models: "list[tuple[Model, ...]]") -> list[Choice] | None:
        """How each part of the ensembles is trained, where that is not to be chosen: by the fit that a warm
        start goes on from, or by `members`."""
        members = self.members_ if self._goes_on() else self.members
        if members is None:
            return None
        choice = Choice(parts_given(members, self.prior_weight, longest=self.steps is None))
        if not sees_smoother(members):
            return [choice] * len(tables)
        if self._goes_on() and self.smoother_ is not None:
            for table in tables:
                require_rows(table)
            return [choice._replace(smoothness=self.smoother_.smoothness)] * len(tables)
        return [
            choice._replace(smoothness=require_smoothness(table, of_table[0]))
            for table, of_table in zip(tables, models, strict=True)
        ]

    def _model(
        self,
        shape: Shape,
        network: Network,
        likelihood: Callable,
        encoding: PiecewiseLinear | None,
        rows: int,
        smoothed: bool,
    ) -> Model:
        prior = network.prior()
        classes, simple = is_classifier(self), shape.simple
        steps = self.steps or steps_for(rows, dimension(prior.mean), classes=classes, simple=simple)
        lengths = (1.0, 1.0) if self.steps or classes or simple else (TRIAL_SHARE, LONGEST)
        numbers = (steps, trial_steps_for(steps, simple=simple), lengths)
        loss = NegativeLogLikelihood(network, likelihood)
        spreads = self._spreads(network, likelihood)
        views = self._views(shape, encoding)
        return Model(shape, loss, prior, *numbers, spreads, encoding, views, smoothed)

    def _views(self, shape: Shape, encoding: PiecewiseLinear | None) -> tuple[View, ...]:
        """What networks may make of a row. Bins that were asked for are seen; draws of a posterior are not
        chosen among."""
        binned = (False,) if encoding is None else (True,) if self.encoding else (False, True)
        linear = (False, True) if shape.skip and not is_sampled(self.method) else (False,)
        return tuple(View(*view) for view in itertools.product(binned, linear))

    def _recipe(self, rows: int, models: "tuple[Model, ...]") -> Recipe:
        simple = all(model.shape.simple for model in models)
        usual = batch_size_for(rows, classes=is_classifier(self), simple=simple)
        return Recipe(
            method=method_of(self.method),
            particles=self.particles,
            mmd=float(self.mmd),
            prior_weight=None if self.prior_weight is None else float(self.prior_weight),
            step_size=float(self.step_size),
            batch_size=usual if self.batch_size is None else self.batch_size,
            mesh=self.mesh,
        )

    def _learn(
        self,
        estimators: "list[AbstractEnsemble]",
        prepared: "list[Prepared]",
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> Ensembles:
        """Fit one ensemble per table, all in one program, and give each to its estimator."""
        keep_programs()
        rng = check_random_state(self.random_state)
        if is_sampled(self.method):
            return self._draw(estimators, prepared, rng, callbacks, checkpoint)
        tables, validation = [one.table for one in prepared], None
        if self.early_stopping:
            cut = [table.cut(self.validation_fraction, rng) for table in tables]
            tables, validation = [train for train, _ in cut], [held_out for _, held_out in cut]
        key = jax.random.key(int(rng.randint(np.iinfo(np.int32).max)))
        initial = None
        if self._goes_on():
            initial = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], self.particles_)
        recipe = self._recipe(max(len(table.weights) for table in tables), prepared[0].models)
        models = [one.models for one in prepared]
        trainer = Trainer(models, recipe, self.verbose > 0)
        found = trainer.fit(
            tables,
            key,
            given=self._given(tables, models),
            initial=initial,
            validation=validation,
            callbacks=callbacks,
            checkpoint=checkpoint,
        )
        if not found.interrupted or len(estimators) == 1:
            columns = (estimators, found.of_tables, models, tables)
            for estimator, ensemble, of_table, table in zip(*columns, strict=True):
                estimator._take(ensemble, of_table)
                if (smoothness := ensemble.choice.smoothness) is not None:
                    estimator.smoother_ = of_table[ensemble.choice.model].smoother(table, smoothness)[0]
        return found

    def _draw(
        self,
        estimators: "list[AbstractEnsemble]",
        prepared: "list[Prepared]",
        rng: np.random.RandomState,
        callbacks: Sequence[Callback],
        checkpoint: Checkpoint | None,
    ) -> Ensembles:
        """`_learn`, of a method that draws networks from the posterior in the place of training them."""
        require_sampled(self, callbacks)
        found = []
        for estimator, one in zip(estimators, prepared, strict=True):
            key = jax.random.key(int(rng.randint(np.iinfo(np.int32).max)))
            recipe, shown = self._recipe(len(one.table.weights), one.models), self.verbose > 0
            ensemble, verdict, signal = drawn_for(
                one.table, one.models[0], recipe, key, progress=shown, checkpoint=checkpoint
            )
            estimator._take(ensemble, one.models)
            estimator.certificate_ = verdict
            found.append(ensemble)
            if signal is not None:
                return Ensembles(found, signal)
        return Ensembles(found)

    def _take(self, found: Ensemble, models: "tuple[Model, ...]") -> None:
        choice, model = found.choice, models[found.choice.model]
        if not self._goes_on():
            (self.spread_, self.spread_power_), self.typical_deviation_ = choice.spread, choice.typical
        self.shape_, self.encoding_, self.smoother_ = model.shape, model.encoding, None
        sees_nothing = model.smoothed and choice.smoothness is None
        self.network_, self.likelihood_ = model.loss.network, model.loss.likelihood
        self.particles_ = jax.tree.map(np.asarray, found.particles)
        if sees_nothing and model.plain is not None and model.views is not None:
            self.network_, self.particles_ = model.plain, model.views.narrowed(self.particles_)
        self.members_ = members_of(choice.parts, self.particles)
        self.prior_weight_ = most_frequent(self.members_["prior_weight"])
        self.n_iter_ = found.steps
        self.certificate_ = None
        self.history_ = found.history
        self.validation_scores_ = scores_of(choice, [model.shape.name for model in models])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
