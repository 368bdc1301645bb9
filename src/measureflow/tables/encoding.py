"""Numbers of a table as more numbers: piecewise-linear bins, in which a network bends where the data lie."""

from typing import Any

import equinox as eqx
import numpy as np

from measureflow.saving.registry import require, saved

# How far a row may lie beyond the rows that bins were learned from, in widths of its outermost bin.
_FARTHEST = 2.0


def _require_edges(encoding: "PiecewiseLinear") -> None:
    edges, binned = encoding.edges, encoding.binned
    sound = isinstance(edges, np.ndarray) and edges.ndim == 2 and edges.dtype == np.float32
    sound = sound and edges.shape[1] >= 3 and bool(np.isfinite(edges).all() and (np.diff(edges) >= 0).all())
    flags = isinstance(binned, np.ndarray) and binned.dtype == bool and binned.shape == edges.shape[:1]
    require(sound and flags, "edges are no bins of columns")


@saved(check=_require_edges)
class PiecewiseLinear(eqx.Module):
    """x ↦ (e₁, …, e_T) for every column that takes more than two values, where for edges b₀ ≤ … ≤ b_T

        eₜ = 2 clip((x − bₜ₋₁)/(bₜ − bₜ₋₁), 0, 1) − 1

    (Gorishniy et al., 2022, "On embeddings for numerical features in tabular deep learning"), behind all
    columns as they are. The first and the last bin go on beyond their ends, by twice their width at most, so
    that an outlier is far away, but not farther. A network sees bins, or the columns that they are cut from:
    see `seen`.

    Parameters
    ----------
    edges
        (columns, T + 1): quantiles of each column. A bin without width says nothing, and is 0.
    binned
        Which columns are cut into bins.
    """

    edges: np.ndarray
    binned: np.ndarray

    @classmethod
    def learn(cls, inputs: np.ndarray, bins: int) -> "PiecewiseLinear":
        """With as many rows in each of a column's bins as its repeated values allow."""
        levels = np.linspace(0, 1, bins + 1)
        edges = np.quantile(inputs.astype(np.float64), levels, axis=0).T.astype(np.float32)
        return cls(np.ascontiguousarray(edges), can_be_cut(inputs))

    @property
    def bins(self) -> int:
        """T."""
        return self.edges.shape[1] - 1

    @property
    def width(self) -> int:
        """How many numbers it makes of a row."""
        return len(self.binned) + self.bins * int(self.binned.sum())

    def seen(self, binned: bool) -> np.ndarray:
        """1 for each of these numbers that a network sees, 0 for others: bins, or the columns that are cut
        into them, and in either case all other columns."""
        columns = ~self.binned if binned else np.ones(len(self.binned), bool)
        bins = np.full(self.bins * int(self.binned.sum()), binned)
        return np.concatenate([columns, bins]).astype(np.float32)

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """Rows (rows, columns) as (rows, width)."""
        return self.of(inputs, np).astype(np.float32)

    def of(self, inputs: Any, numpy: Any) -> Any:
        """The same by another library's `numpy`, such as JAX's, for programs."""
        cut = np.flatnonzero(self.binned)
        edges = self.edges[cut]
        widths = np.diff(edges)
        wide = widths > 0
        lowest, highest = (numpy.asarray(end)[None] for end in _ends(wide))
        positions = (inputs[:, cut, None] - edges[None, :, :-1]) / np.where(wide, widths, np.float32(1))[None]
        bins = numpy.where(wide[None], 2 * numpy.clip(positions, lowest, highest) - 1, np.float32(0))
        return numpy.concatenate([inputs, bins.reshape(inputs.shape[0], self.bins * len(cut))], axis=1)


def can_be_cut(inputs: np.ndarray) -> np.ndarray:
    """Which columns take more than two values."""
    return ((inputs != inputs.min(axis=0)) & (inputs != inputs.max(axis=0))).any(axis=0)


def _ends(wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between which positions a bin goes: 0 and 1, and beyond them for a column's outermost ones."""
    lowest, highest = np.zeros(wide.shape), np.ones(wide.shape)
    for column in np.flatnonzero(wide.any(axis=1)):
        first, last = np.flatnonzero(wide[column])[[0, -1]]
        lowest[column, first], highest[column, last] = -_FARTHEST, 1 + _FARTHEST
    return lowest, highest


def encoded(encoding: PiecewiseLinear | None, inputs: np.ndarray) -> Any:
    """Rows as the network sees them."""
    return inputs if encoding is None else encoding(inputs)
