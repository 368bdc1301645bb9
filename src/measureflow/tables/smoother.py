"""A Gaussian process of a small table, whose predictions networks may see beside its columns: where targets
are a smooth function of the columns, it says of few rows what networks need many to learn."""

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
import scipy.optimize
from jaxtyping import Float
from sklearn.exceptions import ConvergenceWarning

from measureflow.saving.registry import require, saved
from measureflow.tables.table import Table

# Distinct rows that are too few to learn lengthscales from, and that are so many that their matrix, of which
# models hold a copy, costs more than it says; columns whose lengthscales cannot be told from so many rows.
_FEWEST_ROWS, _MOST_ROWS, _MOST_COLUMNS = 50, 1_500, 100
# Lengthscales are learned from so many rows, in so many steps: more hardly move them.
_LEARNED_FROM, _MOST_ITERATIONS = 300, 50
# Of targets with variance 1: below this, single precision is not enough to say what a process says.
_SMALLEST_NOISE = 3e-4
# Rows that are predicted at a time.
_BLOCK = 2_000
#: What it says of a row: m(x) and log s(x).
WIDTH = 2


class Smoothness(NamedTuple):
    """The covariance of a Gaussian process, signal·κ(x, x′) + noise·1[x = x′], with κ the Matérn kernel of
    smoothness 5/2 and a lengthscale for each column."""

    lengthscales: tuple[float, ...]
    signal: float
    noise: float

    @classmethod
    def learn(cls, table: Table) -> "Smoothness | None":
        """By the marginal likelihood of some rows (Rasmussen and Williams, 2006, section 5.4); None where
        rows are too few or too many."""
        points, means, _ = _distinct(table)
        if not _FEWEST_ROWS <= len(points) <= _MOST_ROWS:
            return None
        # They take a while to import.
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        some = np.random.default_rng(0).permutation(len(points))[:_LEARNED_FROM]
        each: Any = np.ones(points.shape[1])
        noise = WhiteKernel(0.1, (_SMALLEST_NOISE, 10.0))
        kernel = ConstantKernel(1.0, (1e-3, 1e3)) * Matern(each, (1e-2, 1e4), nu=2.5) + noise
        minimised: Any = _minimised
        process = GaussianProcessRegressor(kernel, optimizer=minimised)
        with warnings.catch_warnings():
            # At the ends of their ranges numbers are as good as beyond them.
            warnings.simplefilter("ignore", ConvergenceWarning)
            found: Any = process.fit(points[some], means[some]).kernel_
        lengthscales = np.atleast_1d(found.k1.k2.length_scale).tolist()
        return cls(tuple(lengthscales), float(found.k1.k1.constant_value), float(found.k2.noise_level))


def _minimised(objective: Any, start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
    options = {"maxiter": _MOST_ITERATIONS}
    found = scipy.optimize.minimize(objective, start, jac=True, bounds=bounds, options=options)
    return found.x, found.fun


def _require_features(smoother: "Smoother") -> None:
    arrays = (smoother.centres, smoother.features, smoother.coefficients)
    sound = all(isinstance(a, np.ndarray) and a.dtype == np.float32 for a in arrays)
    sound = sound and [a.ndim for a in arrays] == [2, 2, 1] and all(np.isfinite(a).all() for a in arrays)
    sound = sound and len(arrays[0]) == len(arrays[1]) and arrays[1].shape[1] == len(arrays[2])
    numbers = smoother.lengthscales, smoother.signal, smoother.noise
    sound = sound and all(isinstance(n, np.ndarray) and n.dtype == np.float64 for n in numbers)
    sound = sound and [n.shape for n in numbers] == [arrays[0].shape[1:], (), ()]
    require(sound and all(bool(np.all(n > 0)) for n in numbers), "smoother_ is no Gaussian process")


@saved(check=_require_features)
class Smoother(eqx.Module):
    """x ↦ (m(x), log s(x)), the mean and the deviation, noise included, of a Gaussian process that has seen
    some rows (xᵢ, zᵢ): with k(x) = signal·κ(x, xᵢ), UΛUᵀ = signal·κ(xᵢ, xⱼ), and the features φ(x) =
    (Λ + noise)^−½ Uᵀ k(x),

        m(x) = ⟨φ(x), (Λ + noise)^−½ Uᵀ z⟩,    s(x)² = signal + noise − ‖φ(x)‖².

    Parameters
    ----------
    lengthscales, signal, noise
        Its `Smoothness`.
    centres
        (n, columns): the distinct rows, over the lengthscales.
    features
        (n, n): U (Λ + noise)^−½.
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
        points, means, places = _distinct(table)
        lengthscales, signal, noise = (np.asarray(number, np.float64) for number in smoothness)
        centres = (points / lengthscales).astype(np.float32)
        values, vectors = np.linalg.eigh(_matern(centres.astype(np.float64), centres, signal, np))
        values = np.maximum(values, 0.0) + noise
        precision = (vectors**2 / values) @ np.ones(len(values))
        left_out = means - vectors @ (vectors.T @ means / values) / precision
        columns = _columns(left_out, 1 / precision, noise, np)[places]
        features = vectors / np.sqrt(values)
        arrays = (centres, features.astype(np.float32), (features.T @ means).astype(np.float32))
        return cls(lengthscales, signal, noise, *arrays), columns.astype(np.float32)

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
        """The same by another library's `numpy`, such as JAX's, for programs."""
        numbers = (self.lengthscales, self.signal, self.noise, self.centres, self.features, self.coefficients)
        lengthscales, signal, noise, centres, features, coefficients = (
            array.astype(inputs.dtype) for array in numbers
        )
        found = _matern(inputs / lengthscales[None], centres, signal, numpy) @ features
        variance = signal + noise - (found**2).sum(axis=1)
        return _columns(found @ coefficients, variance, noise, numpy)


def _columns(mean: Any, variance: Any, noise: Any, numpy: Any) -> Any:
    """m and log s; rounding leaves no variance below that of noise."""
    return numpy.stack([mean, numpy.log(numpy.maximum(variance, noise)) / 2], axis=1)


def _matern(points: Any, centres: Any, signal: Any, numpy: Any) -> Any:
    """signal·κ, with κ(r) = (1 + √5 r + 5r²/3) exp(−√5 r), r the distance in lengthscales."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None] - 2 * (points @ centres.T)
    far = numpy.sqrt(5 * numpy.maximum(squares, 0))
    return signal * (1 + far + far**2 / 3) * numpy.exp(-far)


def _distinct(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with the same inputs as one, in double precision: these inputs, the means of their targets, and
    which of them each row is."""
    points, places = np.unique(table.inputs, axis=0, return_inverse=True)
    places = places.reshape(-1)
    sums = np.bincount(places, table.weights * table.targets.reshape(-1).astype(np.float64))
    return points.astype(np.float64), sums / np.bincount(places, table.weights), places


def may_smooth(rows: int, columns: int) -> bool:
    """Whether so many rows of so many columns may have one."""
    return _FEWEST_ROWS <= rows <= _MOST_ROWS and columns <= _MOST_COLUMNS
