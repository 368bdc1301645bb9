"""Figure 5 (Appendix G): Figure 3 again, with four particles for four modes.

The paper's point: with as few particles as modes, what a method does is decided by where its particles start.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from measureflow.spaces.kernels import SquaredExponential, median_heuristic
from measureflow.spaces.measures import Flat
from measureflow.statement.problem import deep_langevin_ensemble
from measureflow.study.paper.claims import SIZE, Claim, Reproduction, at_most, near
from measureflow.study.paper.multimodal import (
    INITIAL,
    MODES,
    Setting,
    draw,
    final_particles,
    fit_gaussian,
    nearest_mode,
    recorded,
    statements,
)
from measureflow.theory import four_modes_loss

PARTICLES = 4


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Four particles from the same start under DE, DLE and DRLE, over many seeds; the first is drawn."""
    setting = Setting(PARTICLES, 1_000, 50) if quick else Setting(PARTICLES, 10_000, 200)
    kernel_key, flow_key, fit_key = jax.random.split(jax.random.key(seed), 3)
    kernel = SquaredExponential(median_heuristic(INITIAL.sample(kernel_key, 1000)))
    particles = final_particles(statements(kernel), setting, flow_key, progress)
    fit = fit_gaussian(deep_langevin_ensemble(four_modes_loss, Flat(), kl=0.5), fit_key, progress)
    shown = {name: rows[0] for name, rows in particles.items()}
    shown["FD-GVI"] = np.asarray(fit.sample(fit_key, PARTICLES))
    modes = {name: nearest_mode(rows) for name, rows in particles.items()}
    return Reproduction(
        _claims(particles, modes),
        recorded(setting, kernel),
        lambda figure: draw(figure, shown),
        figure_size=(12.0, 3.3),
    )


def _claims(particles: dict[str, np.ndarray], modes: dict[str, np.ndarray]) -> list[Claim]:
    seeds = len(modes["DE"])
    occupied = np.array([len(set(row)) for row in modes["DE"]])
    chance = 4 * (1 - 0.75**4)
    moved = particles["DE"] - MODES[modes["DE"]]
    same = {name: np.mean(modes[name] == modes["DE"]) for name in ("DLE", "DRLE")}
    repelled = np.mean([len(set(row)) for row in modes["DRLE"]])
    return [
        at_most("DE: every particle is at a minimum: largest distance", 1e-2, jnp.abs(moved).max().item()),
        near(
            f"DE: mean number of modes that 4 particles occupy, over {seeds} seeds (chance: 4(1 − ¾⁴))",
            chance,
            occupied.mean(),
            stats.norm.isf(SIZE / 2) * occupied.std(ddof=1) / np.sqrt(seeds),
            "tolerance: a test of size 0.001.",
        ),
        Claim(
            "from the same start, DLE's and DRLE's particles end in the modes that DE's do",
            "paper",
            "most of them",
            {name: round(float(share), 3) for name, share in same.items()},
            "more than half",
            all(share > 0.5 for share in same.values()),
            f"noise decides for particles that start near a border. DRLE's 4 particles occupy {repelled:.2f} "
            f"modes on average, DE's {occupied.mean():.2f}.",
        ),
    ]
