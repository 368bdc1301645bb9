"""How far a row is from the rows of training."""

import dataclasses

import numpy as np
from jaxtyping import Float

from measureflow.saving.registry import require, saved

#: Where rows become more numbers than this, correlations are left out.
MOST_CORRELATED = 400
# Of training rows, this share is nearer than distance 1.
SHARE = 0.99
_FOLDS = 5


def _shaped(surroundings: "Surroundings") -> None:
    root, far = surroundings.root, surroundings.far
    require(root.dtype == np.float32 and np.isfinite(root).all(), "root is no finite numbers")
    square = root.ndim == 2 and root.shape[0] == root.shape[1]
    require(square or root.ndim == 1, "root is no square matrix and no vector")
    require(np.isfinite(far) and far > 0, "far is no distance")


@saved(check=_shaped)
@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The distance of Mahalanobis, d(z) = ‖Rz‖ with RᵀR = C⁻¹, over the one that 99% of training rows have.

    C is the covariance of standardised inputs, shrunk towards its diagonal (Ledoit and Wolf, 2004), or the
    diagonal alone where there are very many. Variances are 1 at least: networks see a rare level at no more
    than 5 deviations, and without that, rows with one would be farther out than all others. A row at more
    than 1 is farther out than 99 of 100 training rows. It does not see holes in the middle of the data. No
    row of training is kept.
    """

    root: np.ndarray
    far: float

    @classmethod
    def learn(cls, z: Float[np.ndarray, "rows width"]) -> "Surroundings":
        """From standardised rows. `far` is that of rows which the covariance has not seen, in five folds."""
        z = np.asarray(z, np.float64)
        place = np.random.default_rng(0).permutation(len(z)) % _FOLDS
        distances = [
            _distances(_root(z[place != fold]), z[place == fold])
            for fold in range(_FOLDS)
            if (place == fold).any() and (place != fold).any()
        ]
        far = float(np.quantile(np.concatenate(distances), SHARE)) if distances else 1.0
        return cls(_root(z).astype(np.float32), max(far, 1e-6))

    def distance(self, z: Float[np.ndarray, "rows width"]) -> Float[np.ndarray, " rows"]:
        """Of standardised rows, in units of `far`."""
        return _distances(self.root.astype(np.float64), np.asarray(z, np.float64)) / self.far


def _root(z: np.ndarray) -> np.ndarray:
    """R, of rows with means near 0."""
    width = z.shape[1]
    if width > MOST_CORRELATED or len(z) < 2:
        return 1 / np.sqrt(np.maximum(np.mean(np.square(z), axis=0), 1.0))
    covariance = z.T @ z / len(z)
    covariance += np.diag(np.maximum(1.0 - np.diag(covariance), 0.0))
    diagonal = np.diag(np.diag(covariance))
    shrinkage = _shrinkage(z, covariance, diagonal)
    # Columns that tell each other exactly have no inverse: a thousandth of the diagonal stays.
    shrunk = (1 - shrinkage) * covariance + max(shrinkage, 1e-3) * diagonal
    return np.linalg.inv(np.linalg.cholesky(shrunk))


def _shrinkage(z: np.ndarray, covariance: np.ndarray, diagonal: np.ndarray) -> float:
    """Σ Var(Cᵢⱼ) / Σ Cᵢⱼ² over i ≠ j: the best weight of the diagonal, between 0 and 1."""
    off = covariance - np.diag(np.diag(covariance))
    squares = np.square(z)
    variances = squares.T @ squares / len(z) - np.square(covariance)
    np.fill_diagonal(variances, 0.0)
    total = float(np.sum(np.square(off)))
    return float(np.clip(np.sum(variances) / len(z) / total, 0.0, 1.0)) if total > 0 else 1.0


def _distances(root: np.ndarray, z: np.ndarray) -> np.ndarray:
    moved = z @ root.T if root.ndim == 2 else z * root
    return np.sqrt(np.sum(np.square(moved), axis=1))
