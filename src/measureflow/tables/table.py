"""Rows to learn from: scaled, weighted, cut in parts, and several tables stacked as one."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


class Table(NamedTuple):
    """Rows to learn from. `weights` have mean 1; `cases` is what they stand for, the n of 1/n."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    cases: float

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> "Table":
        """A row of weight k stands for k equal rows."""
        return cls(inputs, targets, weights / weights.mean(), float(weights.sum()))

    @property
    def counts(self) -> np.ndarray:
        """How many equal rows each stands for."""
        return self.weights * self.cases / len(self.weights)

    def rows(self, chosen: np.ndarray) -> "Table":
        """Some of its rows."""
        return Table.of(self.inputs[chosen], self.targets[chosen], self.counts[chosen])

    def cut(self, fraction: float, rng: np.random.RandomState) -> "tuple[Table, Table]":
        """What is left to train on, and `fraction` of the rows."""
        rows = len(self.weights)
        number = max(round(fraction * rows), 1)
        if number >= rows:
            raise ValueError(
                f"validation_fraction={fraction} of {rows} rows leaves none to train on; try a smaller one."
            )
        order = rng.permutation(rows)
        return self.rows(order[number:]), self.rows(order[:number])


def few_sizes(rows: int) -> int:
    """The next of a few numbers, eight between one power of 2 and the next: tables of about as many rows then
    share their programs."""
    step = 2 ** max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def stacked(tables: list[Table], rows: int) -> tuple[Array, Array, Array]:
    """Tables as (table, row, ...), filled up to so many rows with rows of weight 0."""

    def filled(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])

    weights = np.zeros((len(tables), rows), np.float32)
    for row, table in zip(weights, tables, strict=True):
        row[: len(table.weights)] = table.weights
    inputs = np.stack([filled(table.inputs) for table in tables])
    targets = np.stack([filled(table.targets) for table in tables])
    return jnp.asarray(inputs), jnp.asarray(targets), jnp.asarray(weights)


def rows_of(frame: Any, rows: np.ndarray) -> Any:
    """Some rows of an array or of a frame."""
    return frame.iloc[rows] if hasattr(frame, "iloc") else frame[rows]
