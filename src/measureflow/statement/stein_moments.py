"""Moments that every law has with its own score, tested on draws: Stein's identity in whitened coordinates.

For draws of exp(−U), any fixed matrix C and any function φ of coordinate j,

    E[φ(θⱼ) (C∇U)ⱼ − φ′(θⱼ) Cⱼⱼ] = 0.

With C the covariance of the draws and φ = 1, (C∇U)ⱼ is how far off the mean is, in the units of θ; with φ
the distance of θⱼ from its mean, the identity says how far off the variance is, whatever the condition of C.
Here both φ are damped, by exp(−z²/8) in standardised z, so that a few far draws do not decide. C and the mean
are those of the *other* draws, so that each identity holds exactly for any number of draws in any dimension.
All of it is NumPy in double precision.
"""

from typing import NamedTuple

import numpy as np
import scipy

# How many whitened directions are tried beside the coordinates: the widest and the narrowest.
_MOST_DIRECTIONS = 100
_EXTREMES = 3
# With fewer draws than this in each half, what a half finds worst is chance.
_ENOUGH = 50
_FOLDS = 5


class Whitening(NamedTuple):
    """Coordinates that some draws whiten: a centre, a standard deviation for each coordinate, and directions
    of the correlation matrix with their standard deviations."""

    centre: np.ndarray
    deviations: np.ndarray
    directions: np.ndarray
    spreads: np.ndarray


class Moments(NamedTuple):
    """One row per draw (or block of draws), one column per identity; all have mean 0 under the law."""

    values: np.ndarray
    kinds: list[tuple[str, int]]


class Tested(NamedTuple):
    """How many standard errors each identity is off, and by how much; the last is that of the whole mean."""

    errors: np.ndarray
    offsets: np.ndarray
    kinds: list[tuple[str, int]]


def whitening(rows: np.ndarray) -> Whitening:
    """Of draws, one a row."""
    centre = rows.mean(axis=0)
    centred = rows - centre
    deviations = centred.std(axis=0)
    scaled = centred / deviations / np.sqrt(len(rows))
    _, spreads, directions = np.linalg.svd(scaled, full_matrices=False)
    known = spreads > 1e-9 * spreads[0]
    return Whitening(centre, deviations, directions[known].T, spreads[known])


def _damped(z: np.ndarray, pull: np.ndarray, variance: np.ndarray | float = 1.0) -> tuple:
    """φ(z)·pull − φ′(z)·variance, for φ = e^{−z²/8} and φ = z e^{−z²/8}."""
    damping = np.exp(-(z**2) / 8)
    of_mean = damping * (pull + 0.25 * z * variance)
    return of_mean, damping * (z * pull - (1 - 0.25 * z**2) * variance)


def coordinate_moments(rows: np.ndarray, scores: np.ndarray, by: Whitening) -> Moments:
    """The identities of every coordinate, and that of the scale of all directions together, at draws with
    these ∇U."""
    z, pull = whitened(rows, scores, by)
    # C∇U over the deviations, coordinate by coordinate.
    moved = (pull * by.spreads) @ by.directions.T
    variances = np.einsum("jk,k->j", by.directions**2, by.spreads**2)
    of_mean, of_scale = _damped((rows - by.centre) / by.deviations, moved, variances)
    whole = _damped(z, pull)[1].mean(axis=1, keepdims=True)
    number = rows.shape[1]
    kinds = [("mean of coordinate", k) for k in range(number)]
    kinds += [("scale of coordinate", k) for k in range(number)]
    return Moments(np.concatenate([of_mean, of_scale, whole], axis=1), [*kinds, ("scale of all", 0)])


def direction_moments(z: np.ndarray, pull: np.ndarray) -> Moments:
    """The identities along directions of whitened space."""
    kinds = [("mean of direction", k) for k in range(z.shape[1])]
    kinds += [("scale of direction", k) for k in range(z.shape[1])]
    return Moments(np.concatenate(_damped(z, pull), axis=1), kinds)


def whitened(rows: np.ndarray, scores: np.ndarray, by: Whitening) -> tuple[np.ndarray, np.ndarray]:
    """z and ∂U/∂z."""
    standard, slopes = (rows - by.centre) / by.deviations, scores * by.deviations
    return standard @ by.directions / by.spreads, slopes @ by.directions * by.spreads


def _chosen(count: int) -> np.ndarray:
    if count <= _MOST_DIRECTIONS:
        return np.arange(count)
    half = _MOST_DIRECTIONS // 2
    return np.concatenate([np.arange(half), np.arange(count - half, count)])


def furthest_directions(z: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """The directions of whitened space in which draws, in their own coordinates, are furthest from
    E[z ∂Uᵀ] = I."""
    found = z.T @ pull / len(z)
    vectors = np.linalg.eigh((found + found.T) / 2)[1]
    count = vectors.shape[1]
    kept = np.unique(np.r_[0 : min(_EXTREMES, count), max(0, count - _EXTREMES) : count])
    return vectors[:, kept]


def folds_of(n: int, folds: int = _FOLDS) -> list[np.ndarray]:
    """Which draws are tested together; draws that are neighbours in the list go to different folds."""
    return [np.arange(k, n, folds) for k in range(min(folds, n // 2))]


def cross_moments(rows: np.ndarray, scores: np.ndarray) -> list[Moments]:
    """The identities at every draw, in coordinates that the others whiten.

    Those of the coordinates take five folds. Directions are chosen by the draws, and folds that choose with
    one another's draws do not err independently: so two halves choose for each other, and those directions
    that are chosen for being far off are tested in each half on its own.
    """
    n = len(rows)
    parts = []
    for fold in folds_of(n):
        others = np.setdiff1d(np.arange(n), fold)
        parts.append(coordinate_moments(rows[fold], scores[fold], whitening(rows[others])))
    found = [Moments(np.concatenate([part.values for part in parts]), parts[0].kinds)]
    return found + halved_moments(rows, scores)


def halved_moments(rows: np.ndarray, scores: np.ndarray) -> list[Moments]:
    """The identities along the directions that two halves of the draws choose for each other."""
    first, second = folds_of(len(rows), 2)
    of_first = whitening(rows[first])
    of_second = _aligned(whitening(rows[second]), of_first)
    of_first = _aligned(of_first, of_second)
    chosen = _chosen(len(of_first.spreads))
    signs = _axes(of_first)
    along, furthest = [], []
    for half, other, by in ((second, first, of_first), (first, second, of_second)):
        z, pull = whitened(rows[half], scores[half], by)
        axes = _axes(by, signs)
        tried = np.concatenate([np.eye(z.shape[1])[:, chosen], axes[1][:, chosen]], axis=1)
        along.append(direction_moments(z @ tried, pull @ tried))
        far = furthest_directions(*whitened(rows[other], scores[other], by))
        furthest.append(direction_moments(z @ far, pull @ far))
    pooled = Moments(np.concatenate([part.values for part in along]), along[0].kinds)
    return [pooled, *furthest] if len(rows) >= 2 * _ENOUGH else [pooled]


def _axes(by: Whitening, like: tuple | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The principal axes of the covariance itself, in θ and in whitened space; with the signs of others."""
    axes, _, whitened_axes = np.linalg.svd(
        by.deviations[:, None] * by.directions * by.spreads, full_matrices=False
    )
    signs = np.ones(axes.shape[1]) if like is None else np.sign(np.einsum("jk,jk->k", axes, like[0]))
    signs = np.where(signs == 0, 1.0, signs)
    return axes * signs, whitened_axes.T * signs


def _aligned(by: Whitening, first: Whitening) -> Whitening:
    """As many directions as the first, with its signs."""
    count = min(len(by.spreads), len(first.spreads))
    signs = np.sign(np.einsum("jk,jk->k", by.directions[:, :count], first.directions[:, :count]))
    directions = by.directions[:, :count] * np.where(signs == 0, 1.0, signs)
    return by._replace(directions=directions, spreads=by.spreads[:count])


def standard_errors(values: np.ndarray) -> np.ndarray:
    """Of every column's mean from 0, as the equally improbable number of a normal law.

    Student's t, with Hall's correction (1992) for skewness, since products are skewed; one more draw as far
    off as the furthest seen is allowed for. Products of few draws have heavier tails than t, so that fewer
    degrees of freedom are counted below 600 draws: by simulation, the level is kept then.
    """
    n = len(values)
    mean = values.mean(axis=0)
    centred = values - mean
    deviation = np.sqrt((centred**2).sum(axis=0) / (n - 1))
    furthest = np.abs(centred).max(axis=0)
    spread = np.sqrt(deviation**2 + furthest**2 / n)
    spread = np.where(spread > 0, spread, np.finfo(float).tiny)
    skewness = (centred**3).mean(axis=0) / spread**3
    t = mean / spread
    corrected = np.sqrt(n) * (t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / (6 * n))
    freedom = max((n - 1) * min(1.0, n / 600), 1.5)
    return _as_normal(scipy.stats.t.logsf(np.abs(corrected), freedom))


def _as_normal(log_tail: np.ndarray) -> np.ndarray:
    """The standard normal number with this tail probability."""
    return np.asarray(np.maximum(-scipy.special.ndtri_exp(np.maximum(log_tail, -1e15)), 0.0))


def mean_terms(rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The identities of the mean in coordinates that the draws themselves whiten."""
    return _damped(*whitened(rows, scores, whitening(rows)))[0]


def whole_mean(pulls: np.ndarray) -> float:
    """Standard errors of ‖mean‖² for rows in whitened coordinates: a sum of scaled χ² with the moments of
    Σ λₖ χ²₁ (Satterthwaite), λ the eigenvalues of their covariance, whose squares are summed without bias."""
    n = len(pulls)
    centred = pulls - pulls.mean(axis=0)
    sizes = (centred**2).sum(axis=1)
    trace = sizes.sum() / (n - 1)
    # Σᵢₖ ⟨xᵢ, xₖ⟩² is the same for rows and for columns: take the smaller product.
    products = centred @ centred.T if n < pulls.shape[1] else centred.T @ centred
    off = (products**2).sum() - (sizes**2).sum()
    squares = max(off / (n * (n - 1)), trace**2 / min(pulls.shape[1] * 50, 1e6), 1e-300)
    freedom = min(trace**2 / squares, pulls.shape[1])
    ratio = n * (pulls.mean(axis=0) ** 2).sum() / trace
    log_tail = scipy.stats.f.logsf(ratio, freedom, freedom * (n - 1))
    return float(_as_normal(np.asarray(log_tail - np.log(2))))


def limit(count: int, level: float) -> float:
    """How many standard errors the largest of so many may be, with probability 1 − level (Bonferroni)."""
    return float(scipy.stats.norm.isf(level / (2 * count)))
