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
        binned = np.array([len(np.unique(column[:10_000])) > 2 for column in inputs.T], bool)
        return cls(np.ascontiguousarray(edges), binned)

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
        cut = zip(inputs.T[self.binned], self.edges[self.binned], strict=True)
        bins = [self._encoded(column, edges) for column, edges in cut]
        return np.concatenate([inputs, *bins], axis=1).astype(np.float32)

    def _encoded(self, column: np.ndarray, edges: np.ndarray) -> np.ndarray:
        widths = np.diff(edges)
        positions = (column[:, None] - edges[None, :-1]) / np.where(widths > 0, widths, 1.0)[None]
        lowest, highest = np.zeros(len(widths)), np.ones(len(widths))
        wide = np.flatnonzero(widths > 0)
        if len(wide):
            lowest[wide[0]], highest[wide[-1]] = -_FARTHEST, 1 + _FARTHEST
        encoded = 2 * np.clip(positions, lowest[None], highest[None]) - 1
        return np.where(widths[None] > 0, encoded, 0.0)


def encoded(encoding: PiecewiseLinear | None, inputs: np.ndarray) -> Any:
    """Rows as the network sees them."""
    return inputs if encoding is None else encoding(inputs)
