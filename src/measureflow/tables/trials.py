"""Ensembles trained side by side: every table with every one of its trials, as one compiled program."""

import functools
import math
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from measureflow.core.devices import PARTICLES, place, require_mesh
from measureflow.core.pytrees import Particles, dimension, root_mean_square_norm, total, weighted_mean
from measureflow.flows.counting import counted
from measureflow.flows.flow import AbstractFlow, particle_leaves
from measureflow.flows.preconditioners import RMSPreconditioner
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.prediction.predictive import Predictive
from measureflow.prediction.spread import spread_factors
from measureflow.runs.batches import Shuffled, Whole, data_key
from measureflow.runs.driver import AbstractRun
from measureflow.runs.loop import repeat
from measureflow.runs.program import Layout
from measureflow.spaces.empirical import Empirical
from measureflow.spaces.measures import Gaussian
from measureflow.statement.problem import Problem
from measureflow.tables.choosing import Trial
from measureflow.tables.methods import Method, Setting
from measureflow.tables.recipe import Recipe
from measureflow.tables.side_by_side import SideBySide, apart
from measureflow.tables.table import Table, few_sizes, stacked
from measureflow.tables.views import View, Views

#: Inputs, targets and weights.
Rows: TypeAlias = tuple[Array, Array, Float[Array, " rows"]]
# A call costs less than a millisecond before its first step.
_SECONDS_A_CALL = 0.01
# History looks at no more rows of a table than this: it is to cost next to nothing.
_MOST_LOOKED_AT = 2_000


class Plan(eqx.Module):
    """How an ensemble is trained, as a function of its table and its trial's `numbers`: the weight λ/n of
    the prior, the steps to take, and the three numbers of its view."""

    loss: NegativeLogLikelihood
    prior: Gaussian
    views: Views | None
    mmd: Float[Array, ""]
    step_size: Float[Array, ""]
    momentum: Float[Array, ""]
    method: Method = eqx.field(static=True)
    particles: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        loss: NegativeLogLikelihood,
        prior: Gaussian,
        views: Views | None,
        recipe: Recipe,
        rows: int,
    ) -> "Plan":
        """That of a recipe, for tables of so many rows."""
        return cls(
            loss,
            prior,
            views,
            *(jnp.asarray(value, jnp.float32) for value in (recipe.mmd, recipe.step_size, recipe.momentum)),
            method=recipe.method,
            particles=recipe.particles,
            batch_size=recipe.batch_size if recipe.batch_size < rows else None,
            mesh=recipe.mesh,
        )

    def setting(self, numbers: Float[Array, "5"]) -> Setting:
        """MMD² with weight w pulls a particle towards the prior about as KL with weight 2w/(eJ) does, so
        `mmd` counts in multiples of J times the prior's weight: the two stay in proportion for any number of
        rows and any network."""
        weight, steps, loss, prior = numbers[0], numbers[1], self.loss, self.prior
        if self.views is not None:
            view = View(*numbers[2:])
            loss, prior = self.views.loss(loss, view), self.views.prior(prior, view)
        mmd = self.mmd * dimension(prior.mean) * weight
        numbers_of_flow = (self.step_size, self.momentum, steps)
        return Setting(loss, prior, weight, mmd, *numbers_of_flow, self.particles)

    def parts(self, numbers: Float[Array, "5"], begun: Any) -> tuple[Problem, AbstractFlow]:
        """The problem, and the flow for a beginning or for a state."""
        setting = self.setting(numbers)
        problem = self.method.problem(setting)
        flow = counted(self.method.flow(setting), problem, begun)
        return problem, flow if self.mesh is None else flow.on(self.mesh)

    def start(self, initial: Particles | None, numbers: Float[Array, "5"], key: Key[Array, ""]) -> Any:
        """The state at step 0, from `initial` if it is given."""
        begun = self.method.start(self.setting(numbers), key) if initial is None else initial
        problem, flow = self.parts(numbers, begun)
        return self._placed(problem, flow, flow.init(problem, begun))

    def _placed(self, problem: Problem, flow: AbstractFlow, state: Any) -> Any:
        if self.mesh is None:
            return state
        rows = particle_leaves(flow, problem, state)
        if not any(rows):
            raise ValueError(
                f"mesh cuts particles, and method={self.method.name!r} has none; leave the mesh out."
            )
        return Layout(self.mesh, rows, None).placed(state)

    def advance(
        self,
        state: Any,
        numbers: Float[Array, "5"],
        key: Key[Array, ""],
        data: Rows,
        cases: Int[Array, ""],
        order_key: Key[Array, ""],
        step: Int[Array, ""],
        steps: Int[Array, ""],
    ) -> tuple[Any, Bool[Array, ""]]:
        """From a step, the state some steps later, and whether all of it is finite; `data` has so many
        cases, and is filled up."""
        # The step is the same for all: so is the batch, for all trials of a table.
        state = eqx.tree_at(lambda s: s.step, state, step)
        problem, flow = self.parts(numbers, state)
        size = self.batch_size
        batches = Whole(_of_mean_1(data)) if size is None else Shuffled(data, size, cases)

        # A function of its own: what XLA fuses, and so the last digit, does then not depend on whether the
        # number of steps is known when it compiles.
        @jax.jit
        def one_step(state: Any) -> Any:
            return flow.step(problem, state, batches.at(state.step, order_key), key)

        state = repeat(one_step, state, steps)
        return self._placed(problem, flow, state), jnp.all(flow.finite(state))

    def members(self, state: Any, numbers: Float[Array, "5"], key: Key[Array, ""]) -> Particles:
        """The particles of a state, or as many draws from the measure it stands for, without weights for
        what they do not see."""
        measure = self.parts(numbers, state)[1].measure(state)
        drawn = measure.particles if isinstance(measure, Empirical) else measure.sample(key, self.particles)
        return place(self.mesh, self.pruned(drawn, numbers))

    def pruned(self, particles: Particles, numbers: Float[Array, "5"]) -> Particles:
        """Without weights for what they do not see."""
        if self.views is None:
            return particles
        return jax.vmap(self.views.pruned, (0, None))(particles, View(*numbers[2:]))

    def observe(
        self, states: Any, data: PyTree, numbers: Float[Array, "c 5"], keys: Key[Array, " c"]
    ) -> dict[str, Float[Array, ""]]:
        """Of all trials of a table, which are one ensemble, on all rows, or on some that lie evenly: `loss`,
        the mean negative log-likelihood over members, and `mixture_loss`, that of their mixture; and
        `gradient_norm`, the L²(Q) norm of the drift."""
        members = jax.vmap(self.members)(states, numbers, keys)
        rows = _of_mean_1(jax.tree.map(lambda leaf: leaf[:: -(-len(leaf) // _MOST_LOOKED_AT)], data))
        of_members = jax.vmap(jax.vmap(self.loss.log_likelihood, (0, None)), (0, None))(members, rows)
        of_members = of_members.reshape(-1, of_members.shape[-1])
        of_mixture = logsumexp(of_members, axis=0) - math.log(len(of_members))
        weights = self.loss.case_weights(rows)
        norms = jax.vmap(self._gradient_norm, (0, 0, None, 0))(states, members, rows, numbers)
        return {
            "loss": weighted_mean(-jnp.mean(of_members, axis=0), weights),
            "mixture_loss": weighted_mean(-of_mixture, weights),
            "gradient_norm": jnp.sqrt(jnp.mean(jnp.square(norms))),
        }

    def _gradient_norm(
        self, state: Any, members: Particles, rows: PyTree, numbers: Float[Array, "5"]
    ) -> Float[Array, ""]:
        problem, flow = self.parts(numbers, state)
        g = getattr(flow, "preconditioner", None)
        if isinstance(g, RMSPreconditioner):
            # It knows the mean square of the drifts of the last hundred steps or so: another gradient would
            # have to be compiled. At step 0 it knows nothing: 0/0.
            updates = jnp.minimum(state.step, g.adapt_steps).astype(g.decay.dtype)
            return jnp.sqrt(total(state.memory) / (1 - g.decay**updates))
        return root_mean_square_norm(problem.free_energy(rows).wasserstein_gradient(members))

    def log_densities(
        self,
        spreads: Float[Array, "s 2"] | None,
        particles: Particles,
        inputs: Array,
        targets: Array,
        weights: Float[Array, " rows"],
    ) -> tuple[Float[Array, "s rows"], Float[Array, ""]]:
        """log (1/N) Σᵢ p(y | x, θᵢ) of every row, for every factor and power of the spread, and the typical
        deviation that these refer to; None is no spread, for any law. Factors of classes are temperatures."""
        mixture = Predictive(self.loss.network, self.loss.likelihood, particles)(inputs)
        if spreads is None:
            return mixture.log_prob(targets)[None], jnp.ones(())
        if mixture.has_classes:
            return jax.lax.map(lambda s: mixture.tempered(s[0]).log_prob(targets), spreads), jnp.ones(())
        deviations = jnp.sqrt(mixture.variance)
        # Rows that fill a shorter table up weigh nothing.
        shares = (weights / jnp.sum(weights)).reshape(-1, *[1] * (deviations.ndim - 1))
        typical = jnp.exp(jnp.mean(jnp.sum(shares * jnp.log(deviations), axis=0)))

        def density(spread: Float[Array, "2"]) -> Float[Array, " rows"]:
            factors = spread_factors(jnp.log(spread[0]), spread[1], typical, deviations)
            return mixture.widened(factors).log_prob(targets)

        return jax.lax.map(density, spreads), typical


def _of_mean_1(rows: Rows) -> Rows:
    """With the weights grown, so that a mean over rows is one over those that are no filling."""
    inputs, targets, weights = rows
    return inputs, targets, weights / jnp.mean(weights)


# One program for all tables t and trials c.


@eqx.filter_jit
def _observe(
    plan: Plan, states: Any, data: PyTree, numbers: Float[Array, "t c 5"], keys: Key[Array, "t c"]
) -> dict[str, Float[Array, " t"]]:
    return jax.vmap(plan.observe)(states, data, numbers, keys)


@eqx.filter_jit
def _log_densities(
    plan: Plan, spreads: Float[Array, "s 2"] | None, members: Particles, data: tuple[Array, Array, Array]
) -> tuple[Float[Array, "s rows"], Float[Array, ""]]:
    """Of one trial of one table: however many there are, it is one program."""
    return plan.log_densities(spreads, members, *data)


class Trials(AbstractRun):
    """Every table with every one of its trials, side by side; from `initial` (table, trial, particle, ...) if
    it is given. Tables are filled up to at least so many `rows`."""

    def __init__(
        self,
        plan: Plan,
        tables: list[Table],
        trials: list[list[Trial]],
        steps: int,
        key: Key[Array, ""],
        initial: Particles | None = None,
        rows: int = 0,
    ):
        numbers = [
            [
                (trial.candidate.prior_weight / table.cases, trial.candidate.steps * steps, *trial.view)
                for trial in row
            ]
            for table, row in zip(tables, trials, strict=True)
        ]
        keys, order_keys = _keys(key, len(tables), len(trials[0]))
        if plan.mesh is not None:
            require_mesh(plan.mesh, plan.particles)
        numbers = jnp.asarray(numbers, jnp.float32)
        cases = [len(table.weights) for table in tables]
        # A batch that is the whole table is not filled up further: its rows would cost as much as others.
        rows = max(cases) if plan.batch_size is None else few_sizes(max(rows, *cases))
        data = stacked(tables, rows), jnp.asarray(cases, jnp.int32)
        self.plan, of_tables, self.numbers, keys = place(
            plan.mesh, (plan, (*data, order_keys), numbers, keys)
        )
        self.data, (start_keys, self.run_keys, self.draw_keys) = of_tables[0], keys
        platforms = {device.platform for device in self.numbers.devices()}
        self.of_each = SideBySide(at_once=plan.mesh is not None or platforms != {"cpu"})
        self.of_tables = of_tables
        if not self.of_each.at_once:
            self.of_tables = apart(of_tables)
            self.seconds = max(self.seconds, _SECONDS_A_CALL * math.prod(self.numbers.shape[:2]))
        self.state = self.of_each(self.plan.start, (initial, self.numbers, start_keys))
        self.finite = np.ones(self.numbers.shape[:2], bool)
        self.step, self.record, self.most = 0, {}, np.iinfo(np.int32).max

    def advance(self, budget: int, end: int) -> None:
        steps = min(budget, end - self.step)
        counts = tuple(jnp.asarray(count, jnp.int32) for count in (self.step, steps))
        of_ensembles = self.state, self.numbers, self.run_keys
        self.state, finite = self.of_each(self.plan.advance, of_ensembles, self.of_tables, counts)
        self.step, self.finite = self.step + steps, np.asarray(finite)

    def members(self) -> Particles:
        """The particles (table, trial, particle, ...)."""
        return self.of_each(self.plan.members, (self.state, self.numbers, self.draw_keys))

    def observed(self) -> dict[str, Float[np.ndarray, " t"]]:
        """What history records of the state."""
        found = _observe(self.plan, self.state, self.data, self.numbers, self.draw_keys)
        return {name: np.asarray(value) for name, value in found.items()}

    def log_densities(
        self, members: Particles, tables: list[Table], spreads: Float[Array, "s 2"] | None = None
    ) -> list[Float[np.ndarray, "c s rows"]]:
        """Of each table's rows, under each of its trials and spreads."""
        return [densities for densities, _ in self.scored(members, tables, spreads)]

    def scored(
        self, members: Particles, tables: list[Table], spreads: Float[Array, "s 2"] | None
    ) -> list[tuple[Float[np.ndarray, "c s rows"], Float[np.ndarray, " c"]]]:
        """`log_densities`, and the typical deviation of each trial."""
        rows, trials = few_sizes(max(len(table.weights) for table in tables)), self._number_of(members)
        found = []
        # One after the other: a program then serves any number of them, and the outputs of all networks on
        # all of them might not fit.
        for index, table in enumerate(tables):
            inputs, targets, weights = (array[0] for array in stacked([table], rows))
            densities, typical = [], []
            for trial in range(trials):
                of_trial = jax.tree.map(lambda leaf, at=(index, trial): leaf[at], members)
                scored = _log_densities(self.plan, spreads, of_trial, (inputs, targets, weights))
                densities.append(np.asarray(scored[0], np.float64)[..., : len(table.weights)])
                typical.append(float(scored[1]))
            found.append((np.stack(densities), np.array(typical)))
        return found

    @staticmethod
    def _number_of(members: Particles) -> int:
        """How many trials every table has."""
        return jax.tree.leaves(members)[0].shape[1]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _keys(
    key: Key[Array, ""], tables: int, trials: int
) -> tuple[tuple[Key[Array, "t c"], ...], Key[Array, " t"]]:
    """Of every trial, to start, to run and to draw members; and of every table, to order its rows."""
    of_tables = jax.vmap(lambda k: jax.random.split(k, 3))(jax.random.split(key, tables))
    of_trials = _of_trials(of_tables, trials)
    return tuple(of_trials[:, :, use] for use in range(3)), jax.vmap(data_key)(of_tables[:, 1])


def _of_trials(keys: Key[Array, "t uses"], trials: int) -> Key[Array, "t c uses"]:
    """One for each trial. Where there is one trial it has the table's own."""
    if trials == 1:
        return keys[:, None]
    of_one = jax.vmap(jax.random.fold_in, (0, None))
    return jnp.stack([jax.vmap(of_one, (0, None))(keys, trial) for trial in range(trials)], axis=1)


def multiple_of_devices(number: int, mesh: Mesh | None) -> int:
    """The next number of particles that the devices of a mesh can share."""
    devices = 1 if mesh is None else mesh.shape[PARTICLES]
    return -(-number // devices) * devices
