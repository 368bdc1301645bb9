"""The four ensembles and FD-GVI on the paper's one-dimensional loss, each against its exact target."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from measureflow.flows.flow import AbstractFlow
from measureflow.flows.integrators import EulerMaruyama
from measureflow.flows.parametric import MeanFieldGaussian, ParametricFlow
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.runs.solve import solve
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.kernels import SquaredExponential, median_heuristic
from measureflow.spaces.measures import AbstractMeasure, Gaussian
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)
from measureflow.theory import AtomicLaw, GridLaw, deep_ensemble_limit, minimiser, quartic_loss
from measureflow.theory.laws import AbstractLaw

GRID = np.linspace(-5, 4, 1801)
SETTINGS = {"particles": 300, "steps": 20_000, "step_size": 1e-3, "kl": 1.0, "mmd": 0.5}


class Row(NamedTuple):
    """One line of the demo's table."""

    method: str
    target: str
    value: float
    distance: float
    chance: float
    left: float
    left_exact: float


class Result(NamedTuple):
    """One method: what it found, what it should have found, and how they compare."""

    method: str
    measure: AbstractMeasure
    particles: np.ndarray
    law: AbstractLaw
    density: np.ndarray | None
    rows: list[Row]


def run_demo(seed: int, progress: bool = False) -> Iterator[Result]:
    """Solve and compare, one method after the other."""
    init_key, kernel_key, run_key, draw_key = jax.random.split(jax.random.key(seed), 4)
    prior = Gaussian(jnp.zeros(1), 1.0)
    kernel = SquaredExponential(median_heuristic(prior.sample(kernel_key, 1000)))
    n, kl, mmd = SETTINGS["particles"], SETTINGS["kl"], SETTINGS["mmd"]
    initial = prior.sample(init_key, n)
    drle = deep_repulsive_langevin_ensemble(quartic_loss, prior, kernel, mmd=mmd, kl=kl)
    wasserstein = WassersteinFlow(step_size=SETTINGS["step_size"], integrator=EulerMaruyama())
    parametric = ParametricFlow(MeanFieldGaussian(), optax.adam(1e-2), samples=200)
    methods: list[tuple[str, Problem, AbstractFlow, Any]] = [
        ("DE", deep_ensemble(quartic_loss), wasserstein, initial),
        ("DLE", deep_langevin_ensemble(quartic_loss, prior, kl=kl), wasserstein, initial),
        ("DRE", deep_repulsive_ensemble(quartic_loss, prior, kernel, mmd=mmd), wasserstein, initial),
        ("DRLE", drle, wasserstein, initial),
        ("FD-GVI", drle, parametric, prior),
    ]
    for name, problem, flow, start in methods:
        steps = SETTINGS["steps"] if flow is wasserstein else 2_000
        measure = solve(problem, flow, start, steps, run_key, progress=name if progress else False).measure
        particles = measure.particles if isinstance(measure, Empirical) else measure.sample(draw_key, n)
        value = float(problem.value(measure))
        rng = np.random.default_rng(seed)
        targets, density = _targets(name, problem, prior)
        rows = [
            Row(
                name,
                label,
                value,
                law.wasserstein_1(particles),
                law.expected_wasserstein_1(rng, n)[0],
                float(np.mean(np.asarray(particles) < 0)),
                float(law.mass_below(0.0)),
            )
            for label, law in targets.items()
        ]
        yield Result(name, measure, np.asarray(particles)[:, 0], next(iter(targets.values())), density, rows)


def _targets(
    name: str, problem: Problem, prior: Gaussian
) -> tuple[dict[str, AbstractLaw], np.ndarray | None]:
    """The exact laws to compare with, the one the method should reach first."""
    if name == "DE":
        atoms, weights = deep_ensemble_limit(quartic_loss, prior, GRID)
        global_minimiser = AtomicLaw(GRID[np.argmax(minimiser(problem, GRID))], np.ones(1))
        return {"Theorem 1": AtomicLaw(atoms, weights), "global minimiser": global_minimiser}, None
    density = minimiser(problem, GRID)
    if name == "DRE":
        return {"q*": AtomicLaw.on_grid(GRID, density)}, None
    return {"q*": GridLaw(GRID, density)}, density
