"""The ways to see a table among which held-out rows choose: how its columns are encoded, the network, and the
law of its targets."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from measureflow.core.validation import require_count
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.saving.registry import saved
from measureflow.spaces.measures import Gaussian
from measureflow.tables.choosing import FEW, FEWEST_TO_CHOOSE, MANY, NO_SPREADS
from measureflow.tables.encoding import PiecewiseLinear
from measureflow.tables.smoother import WIDTH, Smoother
from measureflow.tables.smoothness import Smoothness
from measureflow.tables.table import Table
from measureflow.tables.views import View, Views

# Bins for a column of numbers, in tables of fewer rows and of more.
_BINS, _MORE_ROWS, _MORE_BINS = 8, 1_000, 16
# Bins of all columns together are no more than these, if each column is to have the fewest: a step costs in
# proportion to them, and most of many columns say little.
_MOST_BINS, _FEWEST_BINS = 300, 4
# How many numbers a table may have with them: one gigabyte, which is in memory a few times while folds are
# trained.
_MOST_NUMBERS = 250_000_000


@saved
class Shape(NamedTuple):
    """What tells models apart.

    Attributes
    ----------
    hidden
        Widths of the hidden layers.
    encoding
        The number of bins for a column of numbers; 0 is none.
    likelihood
        As `likelihood=` of an estimator; None for classes.
    """

    hidden: tuple[int, ...]
    encoding: int
    likelihood: Any = None

    @property
    def simple(self) -> bool:
        """Whether it has one hidden layer at most, and no bins: the setting of the UCI benchmarks."""
        return self.encoding == 0 and len(self.hidden) <= 1

    @property
    def activation(self) -> str:
        """Where none is asked for. Several layers are smooth, and pass a linear function on by units that do
        just that."""
        return "relu+tanh" if self.simple else "silu+tanh+identity"

    @property
    def skip(self) -> bool:
        """Whether some networks may be linear."""
        return bool(self.hidden) and not self.simple

    @property
    def name(self) -> str:
        """For people: "16, 16 units, 16 bins, mixture"."""
        parts = [f"{', '.join(map(str, self.hidden))} units" if self.hidden else "no hidden layer"]
        parts += [f"{self.encoding} bins"] if self.encoding else []
        law = self.likelihood
        if law is not None:
            parts.append(law if isinstance(law, str) else type(law).__name__)
        return ", ".join(parts)


def default_shapes(rows: int, columns: int, likelihoods: tuple[Any, ...]) -> tuple[Shape, ...]:
    """What held-out rows of a table may choose from, of which so many columns can be cut into bins.
    `likelihoods` has a plain law, where there is one a law that bends, and where targets look like counts, or
    shares, a law of these. Too few rows to choose by have one layer and the plain law. Many columns have
    fewer bins each, and none where the table would not fit into memory with them."""
    if rows < FEWEST_TO_CHOOSE:
        return (Shape((50,), 0, likelihoods[0]),)
    hidden = (16,) * 4 if rows < FEW else (32,) * 3 if rows < MANY else (64,) * 3
    bins = _BINS if rows < _MORE_ROWS else _MORE_BINS
    while bins > _FEWEST_BINS and columns * bins > _MOST_BINS:
        bins //= 2
    bins = bins if rows * columns * bins <= _MOST_NUMBERS else 0
    return tuple(Shape(hidden, bins, law) for law in likelihoods[1:] or likelihoods)


def given(shapes: Iterable[Shape], **settings: Any) -> tuple[Shape, ...]:
    """Those shapes with the settings that are not None in the place of their own: each once."""
    asked = {name: value for name, value in settings.items() if value is not None}
    return _each_once(shape._replace(**asked) for shape in shapes)


def _each_once(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    # A likelihood of one's own is the same if it is the very object.
    known: dict[Any, Shape] = {}
    for shape in shapes:
        law = shape.likelihood if isinstance(shape.likelihood, str) else id(shape.likelihood)
        known.setdefault((shape.hidden, shape.encoding, law), shape)
    return tuple(known.values())


class Model(NamedTuple):
    """One way to see a table.

    Attributes
    ----------
    shape
        What it was made of.
    loss, prior
        ℓ(θ, batch), which holds network and likelihood, and P.
    steps, trial_steps
        How long its ensembles are trained, and how long trials of it.
    lengths
        The shares of these steps that ensembles take where targets are mostly noise, and where they have
        little.
    spreads
        The factors and powers that the spread of its predictive law may have.
    encoding
        What makes more numbers of the columns, if anything does.
    tried
        What its networks may make of a row.
    smoothed
        Whether inputs have room for what a smoother says of a row, behind all other numbers: where there is
        none, zeros, which no network sees.
    plain
        The network without that room.
    units
        Those of the targets, as the estimator keeps them.
    targets
        Targets as they are in the table ↦ as the likelihood sees them; None where these are the same.
    log_volume
        Targets as they are in the table ↦ log |dz/dy| of each, by which densities of models that see them in
        other units can be compared; None where it is 0.
    """

    shape: Shape
    loss: NegativeLogLikelihood
    prior: Gaussian
    steps: int
    trial_steps: int
    lengths: tuple[float, float] = (1.0, 1.0)
    spreads: np.ndarray = NO_SPREADS
    encoding: PiecewiseLinear | None = None
    tried: tuple[View, ...] = (View(),)
    smoothed: bool = False
    plain: Network | None = None
    units: Any = None
    targets: Callable[[np.ndarray], np.ndarray] | None = None
    log_volume: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def views(self) -> Views | None:
        """What networks with any view see; None where all see all."""
        return Views.of(self.loss.network, self.encoding, WIDTH if self.smoothed else 0)

    @property
    def learns_on(self) -> bool:
        """Whether its ensembles are trained for longer than its trials."""
        return self.trial_steps < self.steps and not self.shape.simple

    def view(self, table: Table) -> Table:
        """The table as this model sees it, but for what a smoother says."""
        inputs = table.inputs if self.encoding is None else self.encoding(table.inputs)
        return self.in_units(table)._replace(inputs=inputs)

    def in_units(self, table: Table) -> Table:
        """The table with targets as the likelihood sees them."""
        return table if self.targets is None else table._replace(targets=self.targets(table.targets))

    def smoother(self, table: Table, smoothness: Smoothness) -> tuple[Smoother, np.ndarray]:
        """One that has seen this table, and what it says of its rows, each left out."""
        return Smoother.of(smoothness, self.in_units(table))

    def seen(self, trained: Table, others: Sequence[Table], smoothness: Smoothness | None) -> list[Table]:
        """A table to learn from as this model sees it, and others as it sees these then: what a smoother says
        of any row, it says without having seen that row."""
        tables = [self.view(table) for table in (trained, *others)]
        if not self.smoothed:
            return tables
        said = [np.zeros((len(table.weights), WIDTH), np.float32) for table in tables]
        if smoothness is not None:
            smoother, left_out = self.smoother(trained, smoothness)
            said = [left_out, *(smoother(table.inputs) for table in others)]
        return [
            table._replace(inputs=np.concatenate([table.inputs, columns], axis=1))
            for table, columns in zip(tables, said, strict=True)
        ]

    def comparable(self, densities: np.ndarray, table: Table) -> np.ndarray:
        """Log densities of a table's rows, in the units that all models share."""
        return densities if self.log_volume is None else densities + self.log_volume(table.targets)


def require_smoothness(table: Table, model: Model) -> Smoothness:
    """That of a table whose networks are to see a smoother."""
    smoothness = Smoothness.learn(model.in_units(table)) if model.smoothed else None
    if smoothness is None:
        raise ValueError(
            "members has networks that are smoothed: they see a Gaussian process of 50 to 1,500 distinct "
            "rows with one target that is a number; set members['smoothed'] to 0, or let held-out rows "
            "choose by members=None."
        )
    return smoothness


def require_hidden(hidden: Any) -> tuple[int, ...] | None:
    """None, or the widths of layers."""
    if hidden is None:
        return None
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise TypeError(f"hidden must be a sequence of layer widths, got {hidden!r}; pass hidden=(50,).")
    return tuple(hidden)


def require_encoding(encoding: Any) -> int | None:
    """None, 0, or a number of bins."""
    if encoding is None or (isinstance(encoding, int) and encoding == 0):
        return encoding
    return require_count("encoding", encoding, 2, "it counts a column's bins; 0 is none, None chooses.")
