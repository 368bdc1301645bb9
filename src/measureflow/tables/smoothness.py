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
#: Of the signal, as noise of every row: with less, rounding may leave rows of great weight no variance.
ROUNDING = 1e-10
# A row of no weight is one of much noise.
_SMALLEST_COUNT = 1e-6
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
        rows = Distinct.of(table)
        if not _FEWEST_ROWS <= len(rows.points) <= _MOST_ROWS:
            return None
        some = rows.chosen(np.random.default_rng(0).permutation(len(rows.points))[:_LEARNED_FROM])
        columns = some.points.shape[1]
        # The logarithms of lengthscales, signal and noise; rows begin at distances of about 1.
        start = np.log([*[np.sqrt(columns)] * columns, 1.0, 0.1])
        expected = _EXPECTED + 0.5 * np.log(columns)

        def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = negative_evidence(logs, some)
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


class Distinct(NamedTuple):
    """The rows of a table, those with the same inputs as one, in double precision.

    Attributes
    ----------
    points, means
        Their inputs, and the means of their targets.
    counts
        How many rows of weight 1 each stands for: the noise of its mean is divided by that.
    squares, freedom
        What targets of the same inputs say of noise: their weighted squares about their mean, and of how many
        independent ones these are the sum. One row of much weight says nothing.
    places
        Which of them each row of the table is.
    """

    points: np.ndarray
    means: np.ndarray
    counts: np.ndarray
    squares: np.ndarray
    freedom: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, table: Table) -> "Distinct":
        """Those of a table whose targets are one number for each row."""
        points, places = np.unique(table.inputs, axis=0, return_inverse=True)
        places, targets = places.reshape(-1), table.targets.reshape(-1).astype(np.float64)
        weights = np.maximum(table.counts, _SMALLEST_COUNT)
        counts, rows = np.bincount(places, weights), np.bincount(places)
        means = np.bincount(places, weights * targets) / counts
        squares = np.bincount(places, weights * (targets - means[places]) ** 2)
        # Beside the one that each mean has; a row of half the weight has half of one.
        freedom = counts * (1 - 1 / rows) + np.minimum(counts / rows - 1, 0)
        return cls(points.astype(np.float64), means, counts, squares, freedom, places)

    def chosen(self, some: np.ndarray) -> "Distinct":
        """Some of them; nothing is known of which row of a table is which."""
        return Distinct(*(column[some] for column in self[:-1]), places=np.zeros(0, int))


def negative_evidence(logs: np.ndarray, rows: Distinct) -> tuple[float, np.ndarray]:
    """−log p(z) = ½ zᵀK⁻¹z + ½ log |K| + const of the means z, and ½ Σ (freedom log noise + squares/noise) of
    what lies about them; and the gradient, whose first part is −½ tr((ααᵀ − K⁻¹) ∂K) with α = K⁻¹z. By the
    logarithm of a lengthscale K changes as D∘(uᵢ − uⱼ)², u being the column over it, of which sums are
    products of matrices."""
    lengthscales, (signal, noise) = np.exp(logs[:-2]), np.exp(logs[-2:])
    scaled, noises = rows.points / lengthscales, noise / rows.counts
    far = _far(scaled, scaled, np)
    slope = signal * 5 / 3 * (1 + far) * np.exp(-far)
    smooth = _matern(far, signal, np) + signal * ROUNDING * np.eye(len(scaled))
    factor = scipy.linalg.cho_factor(smooth + np.diag(noises), lower=True)
    alpha = scipy.linalg.cho_solve(factor, rows.means)
    squares, freedom = np.sum(rows.squares) / noise, np.sum(rows.freedom)
    value = 0.5 * rows.means @ alpha + np.sum(np.log(np.diag(factor[0])))
    value += 0.5 * (freedom * np.log(noise) + squares)
    pull = 0.5 * (np.outer(alpha, alpha) - scipy.linalg.cho_solve(factor, np.eye(len(scaled))))
    weights = pull * slope
    of_lengthscales = 2 * (np.sum(weights, axis=1) @ scaled**2 - np.sum(scaled * (weights @ scaled), axis=0))
    of_noise = np.diag(pull) @ noises - 0.5 * (freedom - squares)
    return float(value), -np.array([*of_lengthscales, np.sum(pull * smooth), of_noise])


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


def may_smooth(rows: int, columns: int) -> bool:
    """Whether a process may be learned of so many rows and columns."""
    return _FEWEST_ROWS <= rows <= _MOST_ROWS and columns <= _MOST_COLUMNS


def require_rows(table: Table) -> None:
    """That a process which is known can be shown these rows."""
    if table.targets.ndim > 1 and table.targets.shape[1] != 1:
        raise ValueError(
            "censoring and several targets are not for networks that see a Gaussian process (`smoother_`), "
            "which this fit would go on from; pass warm_start=False to fit anew."
        )
    if len(table.weights) > _MOST_ROWS:
        raise ValueError(
            f"warm_start goes on from networks that see a Gaussian process (`smoother_`), which may have "
            f"{_MOST_ROWS:,} rows, got {len(table.weights):,}; pass warm_start=False to fit anew."
        )
