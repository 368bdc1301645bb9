"""From tables to ensembles of networks: the setting that needs no tuning, and how it chooses what it must.

Every table becomes one problem L(Q) = ∫ℓ dQ + λ·D(Q, P): ℓ the mean negative log-likelihood, P Gaussian with
the fan-in of each layer. Two things a table decides for itself, by the log predictive density of held-out
rows. The weight of the prior: some tables need the Bayes posterior, others are predicted far better by a
colder one. And the spread of the predictive law about its mean: the mean of an ensemble errs less than its
members, whose noise is fitted to their own errors. All tables, folds and candidates are trained side by side,
as one compiled program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key, PyTree
from tqdm.auto import tqdm

from measureflow.core.devices import PARTICLES, place, require_mesh
from measureflow.core.pytrees import Parameters, Particles, dimension
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.parametric import MeanFieldGaussian, ParametricFlow
from measureflow.flows.preconditioners import RMSPreconditioner
from measureflow.flows.schedules import CosineDecay
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.networks.likelihoods import NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.prediction.predictive import Predictive
from measureflow.runs.loop import run
from measureflow.spaces.kernels import SquaredExponential, Whiten
from measureflow.spaces.measures import Empirical, Gaussian
from measureflow.statement.problem import (
    Problem,
    deep_ensemble,
    deep_langevin_ensemble,
    deep_repulsive_ensemble,
    deep_repulsive_langevin_ensemble,
)

METHODS = ("DRLE", "DRE", "DLE", "DE", "FD-GVI")

# Steps of one compiled call: short enough for a progress bar, and a fixed number, which a GPU's loop needs to
# go on without asking the host.
_BLOCK = 500
# Below this many rows, held-out rows cannot tell candidates apart.
FEWEST_TO_CHOOSE = 50
# From this many rows on, one held-out tenth (of at most so many rows) says as much as three folds.
MANY, MOST_HELD_OUT, FOLDS = 5_000, 5_000, 3
# Choosing is done with fewer particles, and in long runs with fewer steps.
CHOOSING_PARTICLES, CHOOSING_STEPS = 8, 20_000
# Factors for the spread of the predictive law, the middle one 1.
SPREADS = np.exp(np.linspace(-1.2, 1.2, 41))


class Candidate(NamedTuple):
    """The prior's weight in multiples of 1/n (1 is the Bayes posterior), and the share of all steps taken."""

    prior_weight: float
    steps: float = 1.0


#: In order of caution: of candidates that held-out rows cannot tell apart, the first is taken.
CANDIDATES = {
    True: (Candidate(1.0), Candidate(0.3), Candidate(0.03)),
    False: (Candidate(1.0, 0.25), Candidate(0.03, 0.25), Candidate(1.0), Candidate(0.03)),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an ensemble is trained. `prior_weight=None` is chosen on held-out rows, and with `calibrate` so is
    the spread of its predictive law, which must be Normal's or Student's then. Particles are cut over the
    axis "particles" of a `mesh`."""

    method: str = "DRLE"
    particles: int = 20
    mmd: float = 0.5
    prior_weight: float | None = None
    step_size: float = 0.01
    momentum: float = 0.9
    batch_size: int = 100
    steps: int = 10_000
    calibrate: bool = True
    mesh: Mesh | None = None

    @property
    def langevin(self) -> bool:
        """Whether the problem has an entropy: then the prior's weight is a temperature, and the length of a
        run does not regularise; without, it is weight decay, and stopping early does."""
        return self.method in ("DRLE", "DLE", "FD-GVI")

    def candidates(self, rows: int) -> tuple[Candidate, ...]:
        """What there is to choose from for a table of so many rows."""
        if self.prior_weight is not None:
            return (Candidate(self.prior_weight),)
        return CANDIDATES[self.langevin] if rows >= FEWEST_TO_CHOOSE else (Candidate(1.0),)


def steps_for(rows: int, parameters: int, *, classes: bool) -> int:
    """40 steps a row, from 4,000 to 10,000, then 20 a row up to 60,000; where targets are classes a fifth,
    then a tenth of that. Fewer for networks of more than 20,000 parameters, whose steps cost more."""
    fewest, few, many = (800, 2_000, 2 * rows) if classes else (4_000, 10_000, 20 * rows)
    steps = max(fewest, min(40 * rows, few), min(many, 60_000))
    return max(int(steps * min(1.0, 20_000 / parameters)), _BLOCK)


def batch_size_for(rows: int) -> int:
    """50 rows, or 100 of 2,000 and more."""
    return 50 if rows < 2_000 else 100


class Table(NamedTuple):
    """Rows to learn from. `weights` have mean 1; `cases` is what they stand for, the n of 1/n."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    cases: float

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> "Table":
        """A row of weight k stands for k equal rows."""
        return cls(inputs, targets, weights / weights.mean(), float(weights.sum()))

    def rows(self, chosen: np.ndarray) -> "Table":
        """Some of its rows."""
        share = self.weights * self.cases / len(self.weights)
        return Table.of(self.inputs[chosen], self.targets[chosen], share[chosen])


class Ensembles(NamedTuple):
    """What `fit` finds: particles (table, particle, ...), what each table chose, the mean held-out log
    predictive density of each of its candidates (empty where there was nothing to choose), the factor for
    the spread of its predictive law, and the steps that its particles took."""

    particles: Particles
    chosen: list[Candidate]
    scores: list[dict[Candidate, float]]
    spreads: list[float]
    steps: list[int]


class Penalised(eqx.Module):
    """ℓ(θ) − w log p(θ): weight decay, which is all that a prior is without an entropy."""

    loss: Callable
    prior: Gaussian
    weight: Float[Array, ""]

    def __call__(self, theta: Parameters, batch: PyTree) -> Float[Array, ""]:
        return self.loss(theta, batch) - self.weight * self.prior.log_density(theta)


def statement(method: str, loss: Callable, prior: Gaussian, prior_weight: Array, mmd: Array) -> Problem:
    """The method's problem. Repulsion acts in coordinates whitened by the prior, where two of its draws are
    √(2J) apart: σ = √J is the median heuristic there. MMD² with weight w pulls a particle towards the prior
    about as KL with weight 2w/(eJ) does, so `mmd` counts in multiples of J times the prior's weight: the
    two stay in proportion for any number of rows and any network."""
    size = dimension(prior.mean)
    kernel = SquaredExponential(math.sqrt(size)).on(Whiten(prior))
    penalised, mmd = Penalised(loss, prior, prior_weight), mmd * size * prior_weight
    if method == "DE":
        return deep_ensemble(penalised)
    if method == "DRE":
        return deep_repulsive_ensemble(penalised, prior, kernel, mmd=mmd)
    if method == "DRLE":
        return deep_repulsive_langevin_ensemble(loss, prior, kernel, mmd=mmd, kl=prior_weight)
    return deep_langevin_ensemble(loss, prior, kl=prior_weight)


def _step_scales(prior: Gaussian) -> Parameters:
    """min(1, 100/fan-in) for every weight: where every weight moves by η, the output of a unit with many
    inputs moves by η times their number. The prior's variance, 2/fan-in, knows the fan-in."""
    return jax.tree.map(lambda deviation: jnp.minimum(1.0, 50 * deviation**2), prior.deviations())


class Program(eqx.Module):
    """One run, as a function of its table and its candidate's `numbers`: prior weight, and steps to take."""

    network: Network
    likelihood: Callable
    prior: Gaussian
    mmd: Float[Array, ""]
    step_size: Float[Array, ""]
    momentum: Float[Array, ""]
    method: str = eqx.field(static=True)
    particles: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    longest: int = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)

    def problem(self, numbers: Float[Array, "2"]) -> Problem:
        loss = NegativeLogLikelihood(self.network, self.likelihood)
        return statement(self.method, loss, self.prior, numbers[0], self.mmd)

    def flow(self, numbers: Float[Array, "2"]) -> AbstractFlow:
        if self.method == "FD-GVI":
            return ParametricFlow(MeanFieldGaussian(), _adam(self.longest), samples=10)
        # It adapts to the end: the run is annealed, and no part of it samples a fixed law.
        preconditioner = RMSPreconditioner(np.iinfo(np.int32).max, scale=_step_scales(self.prior))
        schedule = CosineDecay(self.step_size, numbers[1])
        return WassersteinFlow(schedule, preconditioner, momentum=self.momentum).on(self.mesh)

    def start(self, initial: Particles | None, numbers: Float[Array, "2"], key: Key[Array, ""]) -> Any:
        """Q₀ = P, or `initial`; for FD-GVI a narrow Gaussian around a network as it is initialised."""
        measure: Any = initial
        if initial is None and self.method == "FD-GVI":
            narrow = jax.tree.map(lambda deviation: 0.1 * deviation, self.prior.deviations())
            measure = Gaussian(self.network.init(key), narrow)
        elif initial is None:
            measure = self.prior.sample(key, self.particles)
        flow = self.flow(numbers)
        return flow.spread(flow.init(self.problem(numbers), measure), self.mesh)

    def advance(self, state: Any, data: PyTree, numbers: Float[Array, "2"], key: Key[Array, ""]) -> Any:
        """The state `_BLOCK` steps later."""
        problem, flow = self.problem(numbers), self.flow(numbers)
        state = run(problem, flow, state, data, key, _BLOCK, batch_size=self.batch_size)
        return flow.spread(state, self.mesh)

    def members(self, state: Any, numbers: Float[Array, "2"], key: Key[Array, ""]) -> Particles:
        """The particles of a state, or as many draws from the Gaussian it stands for."""
        measure = self.flow(numbers).measure(state)
        drawn = measure.particles if isinstance(measure, Empirical) else measure.sample(key, self.particles)
        return place(self.mesh, drawn)

    def log_densities(
        self, spreads: Float[Array, " s"] | None, particles: Particles, inputs: Array, targets: Array
    ) -> Float[Array, "s rows"]:
        """log (1/N) Σᵢ p(y | x, θᵢ) of every row, for every factor of the spread; None is 1, for any law."""
        predictive = Predictive(self.network, self.likelihood, particles)
        if spreads is None:
            return predictive(inputs).log_prob(targets)[None]
        mixture = predictive(inputs)
        return jax.lax.map(lambda spread: mixture.widened(spread).log_prob(targets), spreads)


@functools.cache
def _adam(steps: int) -> optax.GradientTransformation:
    """One object for one number of steps: another one would be another program."""
    return optax.adam(optax.cosine_decay_schedule(1e-2, steps))


# Each of these is one program for all tables t and candidates c.


@eqx.filter_jit
def _start(
    program: Program, initial: Particles | None, numbers: Float[Array, "t c 2"], keys: Key[Array, " t"]
) -> Any:
    candidates = jax.vmap(program.start, (None, 0, None))
    return jax.vmap(candidates, (0, 0, 0))(initial, numbers, keys)


@eqx.filter_jit(donate="all-except-first")
def _advance(fixed: tuple, states: Any) -> Any:
    program, data, numbers, keys, step = fixed

    def one(state: Any, data: PyTree, numbers: Array, key: Array) -> Any:
        # The step is the same for all: so is the batch, for all candidates of a table.
        return program.advance(eqx.tree_at(lambda s: s.step, state, step), data, numbers, key)

    candidates = jax.vmap(one, (0, None, 0, None))
    return jax.vmap(candidates, (0, 0, 0, 0))(states, data, numbers, keys)


@eqx.filter_jit
def _members(
    program: Program, states: Any, numbers: Float[Array, "t c 2"], keys: Key[Array, " t"]
) -> Particles:
    return jax.vmap(jax.vmap(program.members, (0, 0, None)), (0, 0, 0))(states, numbers, keys)


@eqx.filter_jit
def _log_densities(
    program: Program, spreads: Float[Array, " s"] | None, members: Particles, inputs: Array, targets: Array
) -> Float[Array, "t c s rows"]:
    candidates = jax.vmap(eqx.Partial(program.log_densities, spreads), (0, None, None))
    # One table after the other: the networks' outputs on all of them might not fit.
    return jax.lax.map(lambda table: candidates(*table), (members, inputs, targets))


def _stacked(tables: list[Table]) -> tuple[Array, Array, Array]:
    """Tables as (table, row, ...). Shorter ones are filled up with rows of weight 0, and the other weights
    grown so that a mean over rows stays what it was."""
    rows = max(len(table.weights) for table in tables)

    def filled(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])

    weights = np.zeros((len(tables), rows), np.float32)
    for row, table in zip(weights, tables, strict=True):
        row[: len(table.weights)] = table.weights * rows / len(table.weights)
    inputs = np.stack([filled(table.inputs) for table in tables])
    targets = np.stack([filled(table.targets) for table in tables])
    return jnp.asarray(inputs), jnp.asarray(targets), jnp.asarray(weights)


def folds(rows: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows to train on, rows held out): three folds, or one held-out tenth of many rows."""
    order = rng.permutation(rows)
    number, size = (FOLDS, rows // FOLDS) if rows < MANY else (1, min(rows // 10, MOST_HELD_OUT))
    parts = [order[part * size : (part + 1) * size] for part in range(number)]
    return [(np.setdiff1d(order, part), part) for part in parts]


class Choice(NamedTuple):
    """What held-out rows choose, and their mean log predictive density for every candidate at its best."""

    candidate: Candidate
    spread: float
    scores: dict[Candidate, float]


def choose(
    densities: Float[np.ndarray, "c s rows"],
    weights: Float[np.ndarray, " rows"],
    candidates: tuple[Candidate, ...],
) -> Choice:
    """Every candidate with the spread that suits it best; of these, the first that held-out rows cannot tell
    from the best; of its spreads, the narrowest that they cannot tell from the best one, since the ensemble
    trained on all rows will have more rows, and more members, than those that were scored."""
    densities = np.where(np.isfinite(densities), densities, -np.inf)
    spreads = SPREADS if densities.shape[1] > 1 else np.ones(1)
    suited = np.argmax(densities @ weights, axis=1)
    at_best = densities[np.arange(len(candidates)), suited]
    scores = dict(zip(candidates, (at_best @ weights / weights.sum()).tolist(), strict=True))
    chosen = first_as_good_as_the_best(at_best, weights)
    spread = first_as_good_as_the_best(densities[chosen], weights)
    return Choice(candidates[chosen], float(spreads[spread]), scores)


def first_as_good_as_the_best(
    densities: Float[np.ndarray, "m rows"], weights: Float[np.ndarray, " rows"]
) -> int:
    """The first whose mean is within one standard error, of the paired difference, of the best mean. A run
    that diverged has no density, and is never taken while another has one."""
    best = densities[np.argmax(densities @ weights)]
    for index, mine in enumerate(densities):
        if np.isfinite(mine).all() and np.isfinite(best).all():
            lost = best - mine
            mean = np.average(lost, weights=weights)
            if mean <= math.sqrt(np.average((lost - mean) ** 2, weights=weights) / len(lost)):
                return index
    return int(np.argmax(densities @ weights))


class Trainer:
    """Trains one ensemble of `network`s for each of some tables."""

    def __init__(
        self, network: Network, likelihood: Callable, prior: Gaussian, recipe: Recipe, progress: bool = False
    ):
        self.network, self.likelihood, self.prior, self.recipe = network, likelihood, prior, recipe
        self.progress = progress

    def fit(
        self,
        tables: list[Table],
        key: Key[Array, ""],
        *,
        initial: Particles | None = None,
        validation: list[Table] | None = None,
    ) -> Ensembles:
        """Choose, on held-out rows, what there is to choose; then train on all rows, from `initial`
        (table, particle, ...) if it is given. With `validation` tables, each ensemble is the best seen on
        its own, and training stops once none improves."""
        choosing_key, training_key = jax.random.split(key)
        recipe, rows = self.recipe, min(len(table.weights) for table in tables)
        candidates = recipe.candidates(rows)
        choices = [Choice(candidates[0], 1.0, {})] * len(tables)
        choosing_steps = min(recipe.steps, CHOOSING_STEPS) if len(candidates) > 1 else 0
        with tqdm(total=choosing_steps + recipe.steps, unit="step", disable=not self.progress) as bar:
            if choosing_steps:
                bar.set_description("choosing the prior's weight")
                choices = self._choose(tables, candidates, choosing_steps, choosing_key, bar)
            chosen = [choice.candidate for choice in choices]
            bar.set_description(f"training {recipe.method}")
            run = _Run(self, tables, [[c] for c in chosen], recipe.particles, recipe.steps, training_key)
            best = None if validation is None else _Best(run, validation)
            members = run.to_the_end(bar, initial, best)
        particles = jax.tree.map(lambda leaf: leaf[:, 0], members)
        taken = [round(c.steps * recipe.steps) for c in chosen] if best is None else best.steps
        spreads, scores = [choice.spread for choice in choices], [choice.scores for choice in choices]
        return Ensembles(particles, chosen, scores, spreads, taken)

    def _choose(
        self, tables: list[Table], candidates: tuple[Candidate, ...], steps: int, key: Array, bar: Any
    ) -> "list[Choice]":
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
        cut = [folds(len(table.weights), rng) for table in tables]
        parts = [(table, *rows) for table, several in zip(tables, cut, strict=True) for rows in several]
        trained = [table.rows(train) for table, train, _ in parts]
        held_out = [table.rows(out) for table, _, out in parts]
        # On a mesh, the next number of particles that its devices can share.
        devices = 1 if self.recipe.mesh is None else self.recipe.mesh.shape[PARTICLES]
        particles = -(-CHOOSING_PARTICLES // devices) * devices
        run = _Run(self, trained, [list(candidates)] * len(parts), particles, steps, key)
        spreads = jnp.asarray(SPREADS, jnp.float32) if self.recipe.calibrate else None
        densities = run.log_densities(run.to_the_end(bar), held_out, spreads)
        choices, first = [], 0
        for several in cut:
            mine = slice(first, first + len(several))
            first += len(several)
            weights = np.concatenate([table.weights for table in held_out[mine]])
            choices.append(choose(np.concatenate(densities[mine], axis=-1), weights, candidates))
        return choices


class _Run:
    """All tables and candidates side by side: compiled calls one after the other."""

    def __init__(
        self,
        trainer: Trainer,
        tables: list[Table],
        candidates: list[list[Candidate]],
        particles: int,
        steps: int,
        key: Key[Array, ""],
    ):
        recipe = trainer.recipe
        self.data, self.steps = _stacked(tables), steps
        self.program = Program(
            trainer.network,
            trainer.likelihood,
            trainer.prior,
            *(jnp.asarray(value, jnp.float32) for value in (recipe.mmd, recipe.step_size, recipe.momentum)),
            method=recipe.method,
            particles=particles,
            batch_size=recipe.batch_size if recipe.batch_size < self.data[0].shape[1] else None,
            # Adam's schedule is part of the program; all other numbers of steps are data.
            longest=steps if recipe.method == "FD-GVI" else 0,
            mesh=recipe.mesh,
        )
        numbers = [
            [(candidate.prior_weight / table.cases, candidate.steps * steps) for candidate in row]
            for table, row in zip(tables, candidates, strict=True)
        ]
        self.numbers = jnp.asarray(numbers, jnp.float32)
        keys = jax.vmap(lambda k: jax.random.split(k, 3))(jax.random.split(key, len(tables)))
        self.start_keys, self.run_keys, self.draw_keys = keys.T
        if recipe.mesh is not None:
            require_mesh(recipe.mesh, particles)
            self.program, self.data, self.numbers, self.start_keys, self.run_keys, self.draw_keys = place(
                recipe.mesh,
                (self.program, self.data, self.numbers, self.start_keys, self.run_keys, self.draw_keys),
            )

    def to_the_end(
        self, bar: Any, initial: Particles | None = None, best: "_Best | None" = None
    ) -> Particles:
        """The particles (table, candidate, particle, ...) at the end, or the best seen."""
        states = _start(self.program, initial, self.numbers, self.start_keys)
        for first in range(0, self.steps, _BLOCK):
            fixed = (self.program, self.data, self.numbers, self.run_keys, jnp.asarray(first, jnp.int32))
            states = _advance(fixed, states)
            bar.update(min(_BLOCK, self.steps - first))
            if best is not None and best.no_longer_improves(self._members(states), first + _BLOCK):
                break
        return self._members(states) if best is None else best.members

    def _members(self, states: Any) -> Particles:
        return _members(self.program, states, self.numbers, self.draw_keys)

    def log_densities(
        self, members: Particles, tables: list[Table], spreads: Float[Array, " s"] | None = None
    ) -> list[Float[np.ndarray, "c s rows"]]:
        """Of each table's rows, under each of its candidates and spreads."""
        inputs, targets, _ = _stacked(tables)
        densities = _log_densities(self.program, spreads, members, inputs, targets)
        of_tables = zip(np.asarray(densities, np.float64), tables, strict=True)
        return [of_table[..., : len(table.weights)] for of_table, table in of_tables]


class _Best:
    """Early stopping: for every table, the members that were best on its validation rows."""

    patience = 10

    def __init__(self, run: Any, tables: list[Table]):
        self.run, self.tables, self.members = run, tables, None
        self.scores, self.steps = np.full(len(tables), -np.inf), [0] * len(tables)
        # Forty looks at a run, and no more than one per compiled call.
        self.interval = max(run.steps // (40 * _BLOCK), 1) * _BLOCK
        self.last_gain = 0

    def no_longer_improves(self, members: Particles, step: int) -> bool:
        if step % self.interval and step < self.run.steps:
            return False
        densities = zip(self.run.log_densities(members, self.tables), self.tables, strict=True)
        scores = np.array([np.average(d[0, 0], weights=table.weights) for d, table in densities])
        better = np.nan_to_num(scores, nan=-np.inf) > self.scores
        if self.members is None:
            self.members = members
        mask = jnp.asarray(better)
        self.members = jax.tree.map(
            lambda new, old: jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old),
            members,
            self.members,
        )
        self.scores = np.where(better, scores, self.scores)
        taken = min(step, self.run.steps)
        self.steps = [taken if gained else old for gained, old in zip(better, self.steps, strict=True)]
        self.last_gain = step if better.any() else self.last_gain
        return step - self.last_gain >= self.patience * self.interval
