"""A Gaussian process of a small table, whose predictions networks may see beside its columns: where targets
are a smooth function of the columns, it says of few rows what networks need many to learn."""

from typing import Any

import equinox as eqx
import numpy as np
import scipy.linalg
from jaxtyping import Float
from threadpoolctl import threadpool_limits

from measureflow.saving.registry import require, saved
from measureflow.tables.smoothness import ROUNDING, Distinct, Smoothness, covariance
from measureflow.tables.table import Table

# Rows that are predicted at a time.
_BLOCK = 2_000
#: What it says of a row: m(x) and log s(x).
WIDTH = 2


def _require_features(smoother: "Smoother") -> None:
    arrays = (smoother.centres, smoother.features, smoother.coefficients)
    sound = all(isinstance(a, np.ndarray) and a.dtype == np.float64 for a in arrays)
    sound = sound and [a.ndim for a in arrays] == [2, 2, 1] and all(np.isfinite(a).all() for a in arrays)
    sound = sound and len(arrays[0]) == len(arrays[1]) and arrays[1].shape[1] == len(arrays[2])
    numbers = smoother.lengthscales, smoother.signal, smoother.noise
    sound = sound and all(isinstance(n, np.ndarray) and n.dtype == np.float64 for n in numbers)
    sound = sound and [n.shape for n in numbers] == [arrays[0].shape[1:], (), ()]
    require(sound and all(bool(np.all(n > 0)) for n in numbers), "smoother_ is no Gaussian process")


@saved(check=_require_features)
class Smoother(eqx.Module):
    """x ↦ (m(x), log s(x)), the mean and the deviation, noise included, of a Gaussian process that has seen
    some rows (xᵢ, zᵢ), of which each stands for nᵢ: with k(x) = signal·κ(x, xᵢ), LLᵀ = signal·κ(xᵢ, xⱼ) +
    noise·1[i = j]/nᵢ, and the features φ(x) = L⁻¹k(x),

        m(x) = ⟨φ(x), L⁻¹z⟩,    s(x)² = signal + noise − ‖φ(x)‖².

    All in double precision: where targets have no noise, the last is a small difference of large numbers.

    Parameters
    ----------
    lengthscales, signal, noise
        Its `Smoothness`.
    centres
        (n, columns): the distinct rows, over the lengthscales.
    features
        (n, n): L⁻ᵀ.
    coefficients
        (n,): of the mean, in these features.
    """

    lengthscales: np.ndarray
    signal: np.ndarray
    noise: np.ndarray
    centres: np.ndarray
    features: np.ndarray
    coefficients: np.ndarray

    @classmethod
    def of(cls, smoothness: Smoothness, table: Table) -> "tuple[Smoother, Float[np.ndarray, 'rows 2']]":
        """One that has seen these rows, and for each of them what one would say of it that had not seen it,
        nor any row with the same inputs: so networks can learn from these rows how far to believe it on
        others (Rasmussen and Williams, 2006, section 5.4.2)."""
        rows = Distinct.of(table)
        lengthscales, signal, noise = (np.asarray(number, np.float64) for number in smoothness)
        centres, noises = rows.points / lengthscales, noise / rows.counts + signal * ROUNDING
        with threadpool_limits(1):
            factor = np.linalg.cholesky(covariance(centres, centres, signal, np) + np.diag(noises))
            features = scipy.linalg.solve_triangular(factor, np.eye(len(factor)), lower=True).T
        coefficients = features.T @ rows.means
        precision = np.sum(features**2, axis=1)
        left_out = rows.means - features @ coefficients / precision
        # Of a single row of weight 1, as of rows that are new.
        columns = _columns(left_out, 1 / precision - noises + noise, noise, np)[rows.places]
        return cls(lengthscales, signal, noise, centres, features, coefficients), columns.astype(np.float32)

    @property
    def smoothness(self) -> Smoothness:
        """What another process of the same kind is made of."""
        return Smoothness(tuple(self.lengthscales.tolist()), float(self.signal), float(self.noise))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """What it says of rows (rows, columns), in double precision: (rows, 2)."""
        rows = inputs.astype(np.float64)
        blocks = [self.of_rows(rows[i : i + _BLOCK], np) for i in range(0, max(len(rows), 1), _BLOCK)]
        return np.concatenate(blocks).astype(np.float32)

    def of_rows(self, inputs: Any, numpy: Any) -> Any:
        """The same by another library's `numpy`, such as JAX's, of double precision, for programs."""
        far = inputs / self.lengthscales[None]
        found = covariance(far, self.centres, self.signal, numpy) @ self.features
        variance = self.signal + self.noise - (found**2).sum(axis=1)
        return _columns(found @ self.coefficients, variance, self.noise, numpy)


def _columns(mean: Any, variance: Any, noise: Any, numpy: Any) -> Any:
    """m and log s; rounding leaves no variance below that of noise."""
    return numpy.stack([mean, numpy.log(numpy.maximum(variance, noise)) / 2], axis=1)
