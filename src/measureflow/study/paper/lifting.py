"""Figure 1 (Section 2): a non-convex loss, its linear lift, the strictly convex regularised lift."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats
from tqdm import tqdm

from measureflow.prediction.colours import COLOURS
from measureflow.spaces.kernels import SquaredExponential
from measureflow.spaces.measures import Gaussian
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.study.paper.claims import Claim, Reproduction, at_most, greater, near
from measureflow.theory import quartic_loss, value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = np.linspace(-5, 4, 901)
PRIOR = Gaussian(jnp.zeros(1), 1.0)
LENGTHSCALE, MMD = 0.7, 3.0


def problems() -> dict[str, Problem]:
    """The lift without regulariser, and with each of the three."""
    kernel = SquaredExponential(LENGTHSCALE)
    return {
        "DE": deep_ensemble(quartic_loss),
        "DLE": deep_langevin_ensemble(quartic_loss, PRIOR, kl=1.0),
        "DRE": deep_repulsive_ensemble(quartic_loss, PRIOR, kernel, mmd=MMD),
        "DRLE": deep_repulsive_langevin_ensemble(quartic_loss, PRIOR, kernel, mmd=MMD, kl=1.0),
    }


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """L along the segment Q_t = (1 − t) Q_A + t Q_B between measures around the two minima. Nothing here is
    random."""
    t = np.linspace(0, 1, 11 if quick else 41)
    ends = [stats.norm.pdf(GRID, centre, 0.3) for centre in (-2, 1)]
    curves = {
        name: np.array([value(problem, GRID, (1 - s) * ends[0] + s * ends[1]) for s in t])
        for name, problem in tqdm(problems().items(), desc="segments", disable=not progress)
    }
    return Reproduction(
        claims=[*_loss_claims(), *_segment_claims(t, ends, curves)],
        settings={"segment": "N(-2, 0.3²) to N(1, 0.3²)", "kl": 1.0, "mmd": MMD, "points": len(t)},
        draw=lambda figure: _draw(figure, t, curves),
    )


def _loss_claims() -> list[Claim]:
    at = jax.vmap(quartic_loss)(jnp.array([-2.0, 0.0, 1.0]))
    note = "ℓ(0) lies above the chord between the two minima."
    chord = float(at[0] * 1 / 3 + at[2] * 2 / 3)
    return [
        greater("ℓ is not convex: its value at 0, between the minima −2 and 1", chord, float(at[1]), note)
    ]


def _segment_claims(t: np.ndarray, ends: list[np.ndarray], curves: dict[str, np.ndarray]) -> list[Claim]:
    bend = {name: np.diff(curve, 2) / (t[1] - t[0]) ** 2 for name, curve in curves.items()}
    h = GRID[1] - GRID[0]
    difference = (ends[0] - ends[1]) * h
    gram = np.exp(-0.5 * (GRID[:, None] - GRID[None]) ** 2 / LENGTHSCALE**2)
    mmd = MMD * difference @ gram @ difference
    rounding = 1e-4  # of single-precision losses, amplified by the second difference
    claims = [
        at_most(
            "without regulariser L is linear: its largest second derivative",
            rounding,
            np.abs(bend["DE"]).max(),
        )
    ]
    claims += [
        greater(f"{name}: L is strictly convex: its smallest second derivative", rounding, bend[name].min())
        for name in ("DLE", "DRE", "DRLE")
    ]
    claims.append(
        near(
            "DRE: the second derivative is 2w·MMD²(Q_A, Q_B) everywhere",
            2 * mmd,
            bend["DRE"].mean(),
            1e-3 * 2 * mmd,
            f"it varies by {np.ptp(bend['DRE']):.2g} along the segment.",
        )
    )
    return claims


def _draw(figure: "Figure", t: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    left, middle, right = figure.subplots(1, 3)
    theta = np.linspace(-3.2, 2.2, 300)
    left.plot(theta, np.asarray(jax.vmap(quartic_loss)(jnp.asarray(theta))), color="0.3")
    left.set(xlabel="θ", ylabel="ℓ(θ)", title="a non-convex loss")
    middle.plot(t, curves["DE"], color=COLOURS["DE"])
    middle.set(xlabel="t", ylabel="∫ ℓ dQₜ", title="its lift is linear in Q")
    for name in ("DLE", "DRE", "DRLE"):
        chord = (1 - t) * curves[name][0] + t * curves[name][-1]
        right.plot(t, curves[name] - chord, color=COLOURS[name], label=name)
    right.axhline(0, color="0.8", linewidth=1, zorder=0)
    right.set(xlabel="t", ylabel="L(Qₜ) − chord", title="regularised, it is strictly convex")
    right.legend(frameon=False)
