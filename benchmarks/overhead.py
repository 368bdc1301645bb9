"""What a step costs over its bare arithmetic.

The baselines (`bare.py`) import nothing from measureflow: the vmapped gradient step, and the same with
normal draws of the particles' shape. For the paper's toys, whose gradient is nothing, the baseline is the
kernel sum over all pairs with the draws.
"""

from typing import Any, NamedTuple

import jax

import measureflow as mf
from benchmarks import bare, ours
from benchmarks.targets import Target, classification, regression
from benchmarks.timing import Contender, Job, Ratio, comparison

BARE, DRAWS, PAIRS = "bare gradient", "bare gradient + draws", "bare kernel sum + draws"
SOLVED = "DRLE by solve"
ROUNDS = 5


class Size(NamedTuple):
    """How many particles, how many steps to time, and how many by `solve`, where it is timed."""

    particles: int
    steps: int
    solve_steps: int | None = None


SMALL = (Size(5, 2000, 5000), Size(20, 1000, 2000), Size(100, 200, 1000))
# On a GPU these take a tenth of a second: there, runs that are worth their history.
SMALL_ON_GPU = tuple(size._replace(solve_steps=10_000) for size in SMALL)


def jobs(*, quick: bool = False) -> list[Job]:
    """The parts of this benchmark; `quick` only shows that they run."""
    if quick:
        return [
            _networks(regression(2), Size(2, 2), 1),
            _toy("quartic loss", mf.theory.quartic_loss, 1, 3, 1),
        ]
    on_cpu = jax.default_backend() == "cpu"
    large, small = (Size(4, 4), SMALL) if on_cpu else (Size(20, 200), SMALL_ON_GPU)
    return [
        *(_networks(regression(size.particles), size, ROUNDS) for size in small),
        _networks(classification(large.particles), large, ROUNDS, large=True),
        _toy("quartic loss", mf.theory.quartic_loss, 1, 5_000, ROUNDS),
        _toy("four modes", mf.theory.four_modes_loss, 2, 5_000, ROUNDS),
    ]


def _networks(target: Target, size: Size, rounds: int, *, large: bool = False) -> Job:
    def run(tick) -> dict[str, Any]:
        contenders = {
            BARE: Contender(bare.gradient_steps(target, size.steps, draws=False), size.steps),
            DRAWS: Contender(bare.gradient_steps(target, size.steps, draws=True), size.steps),
        }
        for method in ours.METHODS:
            contenders[method] = Contender(ours.run(target, method, size.steps), size.steps)
        for name, problem in ours.projected(target).items() if large else ():
            steps_of = ours.steps_of(problem, target.particles, size.steps, target.data)
            contenders[name] = Contender(steps_of, size.steps)
        if size.solve_steps is not None:
            solved = ours.solve(target, "DRLE", size.solve_steps)
            contenders[SOLVED] = Contender(solved, size.solve_steps)
        return comparison(target.title, contenders, _wanted(size, large), rounds, tick, unit="step")

    return Job(target.title, rounds + 1, run)


def _wanted(size: Size, large: bool) -> list[Ratio]:
    """On a CPU half of a step is its draws: there, small networks are held to the gradient and the draws
    together; on a GPU, large ones to the gradient alone."""
    on_cpu = jax.default_backend() == "cpu"
    promised = {"DRE": 1.15, "DRLE": 1.3} if large else {SOLVED: 1.5}
    promised = {} if on_cpu else promised
    others = ("DRE, projected", "DRLE, projected") if large else ()
    methods = [*ours.METHODS, *others, *([SOLVED] if size.solve_steps is not None else [])]
    found = [Ratio(method, BARE, at_most=promised.get(method)) for method in methods]
    at_most = 1.25 if on_cpu and not large else None
    return [*found, Ratio("DLE", DRAWS), Ratio("DRLE", DRAWS, at_most=at_most)]


def _toy(name: str, loss, dimension: int, steps: int, rounds: int) -> Job:
    title = f"300 particles in {dimension}-D, {name}"

    def run(tick) -> dict[str, Any]:
        particles = jax.random.normal(jax.random.key(0), (300, dimension))
        prior, kernel = mf.Gaussian(jax.numpy.zeros(dimension), 1.0), mf.SquaredExponential(1.0)
        problem = mf.deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=0.5, kl=1.0)
        flow, key = mf.WassersteinFlow(1e-3), jax.random.key(2)
        contenders = {
            PAIRS: Contender(bare.kernel_steps(particles, steps, 1.0), steps),
            "DRLE": Contender(ours.steps_of(problem, particles, steps), steps),
            SOLVED: Contender(lambda: mf.solve(problem, flow, particles, steps, key).state, steps),
        }
        # The promise is of the first toy. The gradient of the second is more than nothing.
        wanted = [Ratio("DRLE", PAIRS), Ratio(SOLVED, PAIRS, at_most=1.5 if dimension == 1 else None)]
        return comparison(title, contenders, wanted, rounds, tick, unit="step")

    return Job(title, rounds + 1, run)
