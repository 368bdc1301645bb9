"""How smooth a table's targets are in its columns: the covariance of a Gaussian process, learned from few
rows."""

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.optimize
from threadpoolctl import threadpool_limits

from measureflow.tables.table import Table

# Distinct rows that are too few to learn lengthscales from, and that are so many that their matrix, of which
# models hold a copy, costs more than it says; columns whose lengthscales cannot be told from so many rows.
_FEWEST_ROWS, _MOST_ROWS, _MOST_COLUMNS = 50, 1_500, 100
# Lengthscales are learned from so many rows, in so many steps: more hardly move them.
_LEARNED_FROM, _MOST_ITERATIONS = 300, 50
# Of targets with variance 1: below this, single precision is not enough to say what a process says.
_NOISES = (3e-4, 10.0)
_LENGTHSCALES, _SIGNALS = (1e-2, 1e4), (1e-3, 1e3)
# The prior of log(lengthscale/√columns), a Normal: without one, 25 lengthscales know 100 rows by heart.
_EXPECTED, _SURE = 1.0, 1.0


class Smoothness(NamedTuple):
    """The covariance of a Gaussian process, signal·κ(x, x′) + noise·1[x = x′], with κ the Matérn kernel of
    smoothness 5/2 and a lengthscale for each column."""

    lengthscales: tuple[float, ...]
    signal: float
    noise: float

    @classmethod
    def learn(cls, table: Table) -> "Smoothness | None":
        """By the marginal likelihood of some rows (Rasmussen and Williams, 2006, section 5.4) and a prior of
        lengthscales that grow with the number of columns (Hvarfner, Hellsten and Nardi, 2024); None where
        rows are too few or too many."""
        points, means, _ = distinct(table)
        if not _FEWEST_ROWS <= len(points) <= _MOST_ROWS:
            return None
        some = np.random.default_rng(0).permutation(len(points))[:_LEARNED_FROM]
        columns = points.shape[1]
        # The logarithms of lengthscales, signal and noise; rows begin at distances of about 1.
        start = np.log([*[np.sqrt(columns)] * columns, 1.0, 0.1])
        expected = _EXPECTED + 0.5 * np.log(columns)

        def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = negative_evidence(logs, points[some], means[some])
            far = (logs[:-2] - expected) / _SURE
            return value + 0.5 * float(far @ far), gradient + np.append(far / _SURE, [0.0, 0.0])

        # Threads of so small matrices wait for each other, beside other work a hundred times as long.
        with threadpool_limits(1):
            found = scipy.optimize.minimize(
                objective,
                start,
                jac=True,
                bounds=np.log([*[_LENGTHSCALES] * columns, _SIGNALS, _NOISES]),
                options={"maxiter": _MOST_ITERATIONS},
            )
        *lengthscales, signal, noise = np.exp(found.x).tolist()
        return cls(tuple(lengthscales), signal, noise)


def negative_evidence(logs: np.ndarray, points: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """−log p(z) = ½ zᵀK⁻¹z + ½ log |K| + const, and its gradient, −½ tr((ααᵀ − K⁻¹) ∂K) with α = K⁻¹z. By the
    logarithm of a lengthscale K changes as D∘(uᵢ − uⱼ)², u being the column over it, of which sums are
    products of matrices."""
    lengthscales, (signal, noise) = np.exp(logs[:-2]), np.exp(logs[-2:])
    scaled = points / lengthscales
    far = _far(scaled, scaled, np)
    smooth, slope = _matern(far, signal, np), signal * 5 / 3 * (1 + far) * np.exp(-far)
    factor = scipy.linalg.cho_factor(smooth + noise * np.eye(len(points)), lower=True)
    alpha = scipy.linalg.cho_solve(factor, targets)
    value = 0.5 * targets @ alpha + np.sum(np.log(np.diag(factor[0])))
    pull = 0.5 * (np.outer(alpha, alpha) - scipy.linalg.cho_solve(factor, np.eye(len(points))))
    weights = pull * slope
    of_lengthscales = 2 * (np.sum(weights, axis=1) @ scaled**2 - np.sum(scaled * (weights @ scaled), axis=0))
    return float(value), -np.array([*of_lengthscales, np.sum(pull * smooth), noise * np.trace(pull)])


def covariance(points: Any, centres: Any, signal: Any, numpy: Any) -> Any:
    """signal·κ of points and centres, both over their lengthscales, by a library's `numpy`."""
    return _matern(_far(points, centres, numpy), signal, numpy)


def _matern(far: Any, signal: Any, numpy: Any) -> Any:
    """signal·κ, with κ(r) = (1 + √5 r + 5r²/3) exp(−√5 r), of √5 r."""
    return signal * (1 + far + far**2 / 3) * numpy.exp(-far)


def _far(points: Any, centres: Any, numpy: Any) -> Any:
    """√5 r, r the distance in lengthscales."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)[None] - 2 * (points @ centres.T)
    return numpy.sqrt(5 * numpy.maximum(squares, 0))


def distinct(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with the same inputs as one, in double precision: these inputs, the means of their targets, and
    which of them each row is."""
    points, places = np.unique(table.inputs, axis=0, return_inverse=True)
    places = places.reshape(-1)
    sums = np.bincount(places, table.weights * table.targets.reshape(-1).astype(np.float64))
    return points.astype(np.float64), sums / np.bincount(places, table.weights), places


def may_smooth(rows: int, columns: int) -> bool:
    """Whether so many rows of so many columns may have one."""
    return _FEWEST_ROWS <= rows <= _MOST_ROWS and columns <= _MOST_COLUMNS
