"""Figure 4 ("why finite N_E matters"): ℓ(θ) = −|sin θ| on [−1000π, 1000π], 2,000 modes and 20 particles.

Appendix G: P flat, Q₀ uniform, τ = 0.001, λ₁ = 0.6 (MMD² weight 0.3), η = 0.01, K = 1,000; the same start for
all methods. In single precision θ ≈ 2800 is known only to 2e-4 and particles stall 0.01 from their minimum,
so this runs in double precision.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.prediction.colours import COLOURS
from measureflow.runs.solve import solve
from measureflow.spaces.kernels import SquaredExponential, median_heuristic
from measureflow.spaces.measures import Flat, Uniform
from measureflow.statement.problem import (
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.study.paper.claims import Claim, Reproduction, at_most, not_rejected
from measureflow.theory import many_modes_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTICLES, TAU, MMD, STEP_SIZE, STEPS, HALF = 20, 0.001, 0.3, 0.01, 1_000, 1_000


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Three methods from one start, in double precision. It is quick as it is."""
    with jax.enable_x64(True):
        particles, lengthscale = _run(seed)
    modes = {name: np.floor(theta / np.pi).astype(int) for name, theta in particles.items()}
    return Reproduction(
        [*_of_theory(particles, modes), *_of_the_paper(particles, modes, np.random.default_rng(seed))],
        {
            "particles": PARTICLES, "tau": TAU, "mmd": MMD, "step_size": STEP_SIZE, "steps": STEPS,
            "lengthscale": lengthscale, "precision": "float64",
        },
        lambda figure: _draw(figure, particles),
        figure_size=(10.0, 3.4),
    )  # fmt: skip


def _run(seed: int) -> tuple[dict[str, np.ndarray], float]:
    init_key, kernel_key, run_key = jax.random.split(jax.random.key(seed), 3)
    low = jnp.full(1, -HALF * jnp.pi, jnp.float64)
    uniform = Uniform(low, -low)
    kernel = SquaredExponential(median_heuristic(uniform.sample(kernel_key, 1000)))
    problems = {
        "DE": deep_ensemble(many_modes_loss),
        "DLE": deep_langevin_ensemble(many_modes_loss, Flat(), kl=TAU),
        "DRLE": deep_repulsive_langevin_ensemble(many_modes_loss, Flat(), kernel, mmd=MMD, kl=TAU),
    }
    initial, flow = uniform.sample(init_key, PARTICLES), WassersteinFlow(STEP_SIZE)
    found = {
        name: np.asarray(solve(problem, flow, initial, STEPS, run_key).state.particles)[:, 0]
        for name, problem in problems.items()
    }
    return found, float(kernel.lengthscale)


def _alone(modes: np.ndarray) -> int:
    """How many particles share their mode with no other."""
    _, counts = np.unique(modes, return_counts=True)
    return int(np.sum(counts == 1))


def _expected_alone(boxes: int) -> float:
    """The mean number of uniform particles that share their box with no other."""
    return PARTICLES * (1 - 1 / boxes) ** (PARTICLES - 1)


def _of_theory(particles: dict[str, np.ndarray], modes: dict[str, np.ndarray]) -> list[Claim]:
    """Within a mode the curvature is 1: after T = 10 the discrete chain has variance τ/(1 − η/2)."""
    minima = {name: (row + 0.5) * np.pi for name, row in modes.items()}
    claims = [
        at_most(
            "DE: every particle is at a minimum: largest distance",
            1e-2,
            np.abs(particles["DE"] - minima["DE"]).max(),
        )
    ]
    for name in ("DLE", "DRLE"):
        stayed = modes[name] == modes["DE"]
        square = np.sum((particles[name] - minima[name])[stayed] ** 2) / (TAU / (1 - STEP_SIZE / 2))
        count = int(stayed.sum())
        claims.append(
            not_rejected(
                f"{name}: particles are N(mode, τ/(1 − η/2)) around their modes (χ² test, two-sided)",
                float(2 * min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count))),
                f"{count} particles are in the mode of their DE twin.",
            )
        )
    return claims


def _of_the_paper(
    particles: dict[str, np.ndarray], modes: dict[str, np.ndarray], rng: np.random.Generator
) -> list[Claim]:
    simulated = np.array([_alone(row) for row in rng.integers(0, 2 * HALF, (20_000, PARTICLES))])
    alone = {name: _alone(row) for name, row in modes.items()}
    same = int(np.sum((modes["DE"] == modes["DLE"]) & (modes["DE"] == modes["DRLE"])))
    apart = {name: float(np.median(np.abs(particles[name] - particles["DE"]))) for name in ("DLE", "DRLE")}
    return [
        Claim(
            "16 of 20 particles are alone in their mode",
            "paper",
            16,
            alone,
            "equal",
            set(alone.values()) == {16},
            f"chance leaves {_expected_alone(2 * HALF):.2f} of 20 alone in 2,000 modes, 16 or fewer with "
            f"probability {np.mean(simulated <= 16):.1e}; in 100 buckets it leaves "
            f"{_expected_alone(100):.1f}.",
        ),
        Claim(
            "particles fall into the same modes under all three methods",
            "paper",
            20,
            same,
            "equal",
            same == PARTICLES,
            "from the same start; a particle that starts within about √τ of a border may go either way.",
        ),
        Claim(
            "the location of the particles varies very little between methods",
            "paper",
            "very little",
            {name: float(f"{distance:.3g}") for name, distance in apart.items()},
            "median below a tenth of a mode's width",
            all(distance < 0.1 * np.pi for distance in apart.values()),
            f"median distance to the DE particle; √τ = {np.sqrt(TAU):.3f}, a mode is π wide.",
        ),
    ]


def _draw(figure: "Figure", particles: dict[str, np.ndarray]) -> None:
    top, bottom = figure.subplots(2, 1)
    edges = np.linspace(-HALF * np.pi, HALF * np.pi, 101)
    top.hist(
        list(particles.values()), edges, color=[COLOURS[name] for name in particles], label=list(particles)
    )
    top.set(ylabel="particles", title="20 particles, 2,000 modes (100 buckets, 20 modes each)")
    top.legend(ncols=3, loc="center")
    for row, (name, theta) in enumerate(particles.items()):
        mode = np.floor(particles["DE"] / np.pi)
        offset = theta - (mode + 0.5) * np.pi
        bottom.plot(offset, np.full_like(offset, row), "|", color=COLOURS[name], markersize=14)
    bottom.set(
        xlabel="θ − the minimum that the DE particle is in", yticks=range(3), yticklabels=list(particles)
    )
    bottom.set(xlim=(-0.25, 0.25), ylim=(-0.6, 2.6))
