"""Columns of tables in units of their own: mean 0, standard deviation 1."""

from typing import Any

import numpy as np

# Standardised inputs stay finite numbers in single precision.
_FARTHEST = 1e6
# The difference of two numbers up to here is a number.
_LARGEST = 1e300


def moments(
    name: str, values: np.ndarray, weights: np.ndarray, names: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and standard deviation of every column; a deviation of 1 for one that does not vary."""
    largest = np.max(np.abs(values), axis=0)
    if np.any(largest > _LARGEST):
        column = int(np.argmax(largest > _LARGEST))
        where = f" in column {column if names is None else repr(names[column])}" if values.ndim > 1 else ""
        raise ValueError(
            f"{name} holds a number of size {np.ravel(largest)[column]:.3g}{where}, and beyond {_LARGEST:g} "
            "differences may be infinite; divide it by a power of ten."
        )
    # A power of two, which changes no digit: so squares are neither infinite nor 0.
    unit = np.ldexp(1.0, np.frexp(np.where(largest > 0, largest, 1.0))[1] - 1)
    scaled = values / unit
    mean = np.asarray(np.average(scaled, axis=0, weights=weights))
    deviation = np.sqrt(np.average((scaled - mean) ** 2, axis=0, weights=weights))
    constant = np.all(values == values[:1], axis=0)
    # What is left of a constant that was computed is rounding.
    varies = ~constant & (deviation > 8 * np.finfo(np.float64).eps * np.abs(mean))
    return np.where(constant, values[0], unit * mean), np.where(varies, unit * deviation, 1.0)


def standardised(values: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(x − mean)/scale in single precision, outliers cut off."""
    # What overflows is as far away as what is cut off.
    with np.errstate(over="ignore"):
        return np.clip((values - mean) / scale, -_FARTHEST, _FARTHEST).astype(np.float32)
