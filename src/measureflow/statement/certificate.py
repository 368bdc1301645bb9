"""Whether particles are stationary, in standard errors: a certificate that costs one gradient."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, PyTree

from measureflow.core.pytrees import Particles, as_matrix, particle_count
from measureflow.statement.free_energy import FreeEnergy
from measureflow.statement.stein_moments import (
    Moments,
    coordinate_moments,
    cross_moments,
    direction_moments,
    folds_of,
    limit,
    mean_terms,
    standard_errors,
    whitened,
    whitening,
    whole_mean,
)

# Exact draws are rejected with this probability.
LEVEL = 1e-3
# Below so many particles, only what is grossly wrong is noticed.
FEW = 50
_LEAST = 8
# For particles that move one another: how many blocks are left out in turn, in each half.
_BLOCKS = 20

#: ∇_W F of several sets of particles, each on its own: leaves have the axes (set, particle, …).
Gradients = Callable[[PyTree[np.ndarray]], PyTree[Array]]


class NotStationaryWarning(UserWarning):
    """Particles that claim to be draws of q* fail their certificate."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Whether particles are stationary: true if no tested moment is further off than chance allows.

    `statistic` is the largest deviation, in standard errors; `limit` what exact draws exceed once in a
    thousand times, whatever their number and dimension. `worst` names the moment, and `estimate` is how far
    off it is: a mean in standard deviations, or a standard deviation relative to the right one. It is local:
    it does not see the masses of modes that the particles have found, nor modes that they have not.
    """

    statistic: float
    limit: float
    worst: str
    estimate: float
    particles: int
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.statistic <= self.limit)

    def __str__(self) -> str:
        level = f"largest deviation {self.statistic:.1f} standard errors, limit {self.limit:.1f}"
        few = (
            f" With {self.particles} particles only gross errors are noticed." if self.particles < FEW else ""
        )
        note = f" {self.note}" if self.note else ""
        if self:
            return (
                f"stationary, as far as {self.particles} particles can tell ({level}); the masses of modes "
                f"are not tested.{few}{note}"
            )
        return (
            f"the particles are not stationary ({level}): {self.worst}{self._size()}. Take more steps; if "
            "that does not help, smaller ones, or mf.EnsemblePreconditioner(adapt_steps); mf.sample does all "
            f"of this.{note}"
        )

    def _size(self) -> str:
        if not np.isfinite(self.estimate):
            return " is off" if self.worst.endswith(",") else ""
        if self.worst.startswith("the mean"):
            return f" is off by about {self.estimate:+.2g} standard deviations"
        return f" is about {self.estimate:.2g} times the right one"


def certify(energy: FreeEnergy, gradients: Gradients, particles: Particles) -> Certificate:
    """The certificate of particles, `gradients` being what computes ∇_W F without the entropy's part."""
    temperature = energy.temperature
    if temperature is None:
        raise ValueError(
            "certify was called for a problem without temperature: without a KL term no law has to be met; "
            "problem.stationarity(particles) is the norm of the gradient."
        )
    n = particle_count(particles)
    if n < _LEAST:
        raise ValueError(f"certify needs at least {_LEAST} particles, got {n}; use more particles.")
    rows, names = np.asarray(as_matrix(particles), np.float64), _names(particles)
    if not np.all(np.isfinite(rows)):
        return _hopeless(n, "some particles are not finite")
    if np.any(rows.std(axis=0) <= 1e-7 * np.abs(rows).max(axis=0)):
        still = names[int(np.argmin(rows.std(axis=0)))]
        return _hopeless(n, f"all particles have the same {still}")
    scaled = _Scores(gradients, particles, float(temperature))
    interacting = energy.interaction is not None or energy.rest is not None
    found = _jackknifed(scaled, rows) if interacting else _independent(scaled, rows)
    return _judged(*found, rows, names) if found is not None else _hopeless(n, "the gradient is not finite")


def _independent(scaled: "_Scores", rows: np.ndarray) -> tuple[list[Moments], np.ndarray] | None:
    (scores,) = scaled([np.arange(len(rows))])
    if not np.all(np.isfinite(scores)):
        return None
    return cross_moments(rows, scores), mean_terms(rows, scores)


def _jackknifed(scaled: "_Scores", rows: np.ndarray) -> tuple[list[Moments], np.ndarray] | None:
    """Particles that move one another: in each half, whitened by the other, with forces among themselves.

    A mean of terms that see the other particles is no mean of independent ones: its standard error is that of
    pseudo-values K·T − (K − 1)·T₋ₖ, with a block of particles left out, its forces too.
    """
    kinds: list[tuple[str, int]] = []
    values, common = [], whitening(rows)
    first, second = folds_of(len(rows), 2)
    for half, other in ((first, second), (second, first)):
        by, blocks = whitening(rows[other]), min(_BLOCKS, len(half) // 2)
        used = half[: len(half) - len(half) % blocks]
        left_out = [np.delete(used, np.s_[k::blocks]) for k in range(blocks)]
        means = []
        for chosen, scores in zip([used, *left_out], [*scaled([used]), *scaled(left_out)], strict=True):
            if not np.all(np.isfinite(scores)):
                return None
            parts = (
                coordinate_moments(rows[chosen], scores, by),
                direction_moments(*whitened(rows[chosen], scores, common)),
            )
            kinds = parts[0].kinds + parts[1].kinds
            means.append(np.concatenate([part.values.mean(axis=0) for part in parts]))
        whole, *without = means
        values += [blocks * whole - (blocks - 1) * left for left in without]
    pseudo, is_along = np.array(values), np.array([kind == "mean of direction" for kind, _ in kinds])
    tested = np.array([kind != "scale of direction" for kind, _ in kinds])
    kept = [kind for kind, yes in zip(kinds, tested, strict=True) if yes]
    return [Moments(pseudo[:, tested], kept)], pseudo[:, is_along]


class _Scores:
    """∇U = ∇_W F/τ of some of the particles, whose forces are those among themselves."""

    def __init__(self, gradients: Gradients, particles: Particles, temperature: float):
        # On the host: taking rows there is quicker than asking a device for it, again and again.
        self.gradients, self.temperature = gradients, temperature
        self.particles = jax.tree.map(np.asarray, particles)

    def __call__(self, sets: list[np.ndarray]) -> list[np.ndarray]:
        """Of several sets of as many particles, by one compiled call."""
        some = jax.tree.map(lambda leaf: leaf[np.stack(sets)], self.particles)
        found = jax.device_get(self.gradients(some))
        rows = [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(found)]
        return list(np.concatenate(rows, axis=2).astype(np.float64) / self.temperature)


def _judged(found: list[Moments], pulls: np.ndarray, rows: np.ndarray, names: list[str]) -> Certificate:
    errors = np.concatenate([standard_errors(part.values) for part in found])
    offsets = np.concatenate([part.values.mean(axis=0) for part in found])
    kinds = [kind for part in found for kind in part.kinds]
    of_mean, most = whole_mean(pulls), limit(len(errors) + 1, LEVEL)
    n, number = rows.shape
    few = f"There are {n} particles in {number} dimensions, so that not all directions can be tested."
    note, statistic = few if n <= 2 * number else "", max(of_mean, float(errors.max()))
    # What can be named is more use than what is furthest off.
    is_coordinate = np.array(["coordinate" in kind for kind, _ in kinds])
    named = np.where(is_coordinate & (errors > most), errors + statistic, errors)
    worst = int(np.argmax(named))
    if named[worst] < of_mean:
        return Certificate(statistic, most, "the mean, in several directions together,", np.nan, n, note)
    kind, index = kinds[worst]
    estimate = _estimate(kind, float(offsets[worst]))
    return Certificate(statistic, most, _named(kind, index, names), estimate, n, note)


def _named(kind: str, index: int, names: list[str]) -> str:
    what, _, where = kind.partition(" of ")
    noun = {"mean": "the mean", "scale": "the standard deviation"}[what]
    if where == "all":
        return f"{noun} in all directions together"
    if where == "coordinate":
        return f"{noun} of {names[index]}"
    return f"{noun} in a direction across coordinates"


def _estimate(kind: str, offset: float) -> float:
    """What a Gaussian with a wrong mean, or a wrong variance, would have to be off by."""
    z = np.linspace(-10, 10, 2001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    damping = np.exp(-(z**2) / 8)
    if kind.startswith("mean"):
        # ∂U = z + δ, with z standardised by the particles themselves.
        return offset / float((density * damping).sum())
    # ∂U = r² z, r the ratio of standard deviations.
    slope, level = (float((density * damping * f).sum()) for f in (z**2, 1 - 0.25 * z**2))
    return float(np.sqrt(max((offset + level) / slope, 0.0)))


def _hopeless(n: int, why: str) -> Certificate:
    return Certificate(np.inf, limit(1, LEVEL), why, np.nan, n)


def _names(particles: Particles) -> list[str]:
    """Of every coordinate of θ, in the order of the ravelled leaves."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(particles):
        name = f"θ{jax.tree_util.keystr(path)}"
        shape = leaf.shape[1:]
        found += [name + (f"[{', '.join(map(str, index))}]" if index else "") for index in np.ndindex(shape)]
    return found
