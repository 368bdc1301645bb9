"""What a table chooses for itself, and that tables trained side by side reach what theory says of each."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from helpers import assert_close, assert_within, key, monte_carlo
from quick import quickly_compiled  # noqa: F401

import measureflow as mf
from measureflow.flows.schedules import CosineDecay
from measureflow.networks.likelihoods import Categorical, Heteroscedastic
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.runs.driver import drive
from measureflow.statement.scores import LogScore
from measureflow.tables.choosing import (
    FACTORS,
    FEW,
    FEWEST_TO_CHOOSE,
    MANY,
    NO_SPREAD,
    POWERS,
    SPREADS,
    TEMPERATURES,
    Choice,
    Trial,
    combined,
    folds_of,
    parts_of,
    spread_for,
    trials_of,
)
from measureflow.tables.comparing import chosen_on_folds
from measureflow.tables.encoding import PiecewiseLinear
from measureflow.tables.members import columns_of, of_all_steps, parts_given
from measureflow.tables.methods import METHODS, SCORED_TOGETHER, WITH_ENTROPY, WITHOUT_ENTROPY, Candidate
from measureflow.tables.models import Model, Shape
from measureflow.tables.on_folds import held_out_weights
from measureflow.tables.recipe import Recipe, batch_size_for, steps_for, trial_steps_for
from measureflow.tables.side_by_side import SideBySide, apart
from measureflow.tables.stopping import PATIENCE, Best
from measureflow.tables.table import Table, few_sizes, stacked
from measureflow.tables.training import Trainer
from measureflow.tables.trials import Plan
from measureflow.tables.views import View, Views

# NumPyro and Optax promote integers and ranks.
pytestmark = pytest.mark.standard_promotion

THREE = (Candidate(1.0), Candidate(0.3), Candidate(0.03))


# What is chosen


TRIALS = tuple(Trial(0, candidate) for candidate in THREE)


def held_out(means, rows=400, noise=1.0, seed=0):
    """Log densities (candidate, 1, row) with these means exactly, and independent noise."""
    values = noise * np.random.default_rng(seed).normal(size=(len(means), 1, rows))
    return values - values.mean(axis=-1, keepdims=True) + np.asarray(means)[:, None, None]


def chosen(densities, weights=None, parts=1):
    weights = np.ones(densities.shape[-1]) if weights is None else weights
    choice = combined(dict(zip(TRIALS, densities, strict=False)), weights, parts)
    spread = spread_for(densities[TRIALS.index(choice.parts[0])], weights)
    return choice._replace(spread=spread)


@pytest.mark.parametrize("gap", [0.5, 0.01])
def test_the_best_mean_is_chosen(gap):
    for best in range(3):
        means = np.zeros(3)
        means[best] = gap
        choice = chosen(held_out(means))
        assert choice.parts == (TRIALS[best],)
        assert choice.spread == NO_SPREAD
        assert_close([choice.scores[trial] for trial in TRIALS], means, 1e-6)


def test_models_are_told_apart():
    other = Trial(1, THREE[0])
    densities = {TRIALS[0]: held_out([0.0])[0], other: held_out([0.1])[0]}
    assert combined(densities, np.ones(400), 1).parts == (other,)
    assert set(combined(densities, np.ones(400), 4).parts) == {other}, "parts are of one model"


@pytest.mark.parametrize("lost", [np.nan, -np.inf, np.inf])
def test_a_candidate_that_diverged_is_never_chosen(lost):
    densities = held_out([0.0, 0.0, -5.0])
    densities[0, 0, 7] = densities[1] = lost
    choice = chosen(densities)
    assert choice.parts == (TRIALS[2],)
    assert choice.scores[TRIALS[0]] == choice.scores[TRIALS[1]] == -np.inf
    assert TRIALS[1] not in chosen(densities, parts=4).parts


def test_weights_of_held_out_rows_count():
    """The second is better on most rows, the first on those that weigh."""
    better = np.where(np.arange(400) < 100, 1.0, -1.0)
    densities = np.stack([better, -better])[:, None] + 0.01 * held_out([0.0, 0.0])
    assert chosen(densities).parts == (TRIALS[1],)
    weights = np.where(np.arange(400) < 100, 9.0, 1.0)
    choice = chosen(densities, weights)
    assert choice.parts == (TRIALS[0],)
    assert_close(choice.scores[TRIALS[0]], np.average(densities[0, 0], weights=weights), 1e-6)


def test_ways_to_share_are_compared_by_the_log_score_of_weighted_particles():
    """The trials as particles of `LogScore`, in quarters: no other way has a better value."""
    rng = np.random.default_rng(0)
    densities = rng.normal(size=(3, 200)) - np.array([[0.0], [0.3], [2.0]])
    found = chosen(densities[:, None], parts=4).parts

    class Recalled(NegativeLogLikelihood):
        def __init__(self):
            self.network, self.likelihood = linear(), unit_normal

        def log_likelihood(self, theta, batch):
            return theta

    def score(way):
        counts = np.array([way.count(place) for place in range(3)])
        there = counts > 0
        measure = mf.Empirical(jnp.asarray(densities[there], jnp.float32), jnp.asarray(counts[there] / 4))
        return float(mf.LogScore(Recalled()).value(measure, (jnp.ones((200, 2)), jnp.ones(200))))

    ways = {way: score(way) for way in itertools.combinations_with_replacement(range(3), 4)}
    assert [TRIALS[place] for place in min(ways, key=ways.get)] == list(found)
    assert len(set(found)) > 1, "several share"
    # Mutants: the best alone, and all alike.
    assert min(ways.values()) < min(ways[0, 0, 0, 0], ways[0, 0, 1, 2]) - 0.005


def test_a_cold_trial_is_judged_by_the_spread_of_all():
    """Laws that are ten times too narrow predict as well as others once they are widened, but an ensemble is
    not widened for the sake of a part."""
    rng = np.random.default_rng(0)
    good, narrow = widened(1.0, 500, rng), widened(10.0, 500, rng)
    choice = chosen(np.concatenate([good, narrow]), parts=4)
    assert choice.parts == (TRIALS[0],) * 4


def test_rows_that_weigh_count_as_repeated_rows():
    densities = np.random.default_rng(0).normal(size=(3, 1, 50))
    weights = np.random.default_rng(1).integers(0, 4, size=50)
    repeated = chosen(np.repeat(densities, weights, axis=-1), parts=4)
    assert chosen(densities, weights.astype(float), parts=4).parts == repeated.parts


def test_parts_are_as_their_shares():
    """Two laws, one of which is right on three rows of four."""
    right = np.arange(400) % 4 > 0
    densities = np.where(np.stack([right, ~right]), 0.0, -20.0)[:, None]
    choice = chosen(densities, parts=4)
    assert choice.parts == (TRIALS[0],) * 3 + (TRIALS[1],)
    assert [choice.shares[trial] for trial in TRIALS[:2]] == [0.75, 0.25]
    assert chosen(densities, parts=1).parts == (TRIALS[0],)


def test_how_many_parts():
    found = {particles: parts_of(particles) for particles in (1, 5, 8, 10, 12, 20, 30, 50, 100)}
    assert found == {1: 1, 5: 1, 8: 2, 10: 2, 12: 3, 20: 4, 30: 3, 50: 2, 100: 4}
    assert [parts_of(20, devices) for devices in (1, 2, 4, 5, 8)] == [4, 2, 1, 4, 1]


def test_what_is_tried_goes_by_rows_and_views():
    columns, bins, linear = View(), View(binned=True), View(linear=True)
    both = (columns, bins)
    assert trials_of([(columns,)], THREE, FEWEST_TO_CHOOSE - 1) == [TRIALS[0]]
    assert trials_of([both, (columns, linear)], THREE, FEWEST_TO_CHOOSE) == [
        Trial(0, THREE[0], columns),
        Trial(0, THREE[1], columns),
        Trial(0, THREE[0], bins),
        Trial(0, THREE[1], bins),
        Trial(1, THREE[0], columns),
        Trial(1, THREE[1], columns),
        Trial(1, THREE[1], linear),
    ]
    assert [len(trials_of([both], THREE, rows)) for rows in (FEW, 1_000)] == [5, 6]


def test_members_are_parts_as_columns():
    parts = (TRIALS[0], TRIALS[1], Trial(0, THREE[1], View(linear=True)), Trial(0, THREE[1], View(True)))
    members = columns_of(part for part in parts for _ in range(5))
    assert parts_given(members) == parts
    assert members["prior_weight"].tolist() == [1.0] * 5 + [0.3] * 15
    assert members["binned"].tolist() == [0.0] * 15 + [1.0] * 5
    assert members["linear"].tolist() == [0.0] * 10 + [1.0] * 5 + [0.0] * 5
    assert parts_given(columns_of([TRIALS[0]] * 20)) == (TRIALS[0],), "one part, where all are alike"


# What a network sees


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("binned", [False, True])
def test_networks_without_weights_are_those_that_do_not_see(binned, skip):
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    inputs[:, 1] = inputs[:, 1] > 0
    encoding = PiecewiseLinear.learn(inputs, 4)
    rows, seen = encoding(inputs), [1, *range(3, 11)] if binned else [0, 1, 2]
    network = Network.mlp(encoding.width, (5,), 2, skip=skip)
    views, view, theta = Views.of(network, encoding), View(jnp.asarray(float(binned))), network.init(key(0))
    blind = rows * np.isin(np.arange(encoding.width), seen)
    layers = Network.mlp(encoding.width, (5,), 2)
    expected = layers.apply([{name: layer[name] for name in ("weight", "bias")} for layer in theta], blind)
    assert_close(network.apply(views.pruned(theta, view), rows), expected, 1e-6)
    assert_close(
        views.loss(NegativeLogLikelihood(network, Heteroscedastic()), view).network.apply(theta, rows),
        expected,
        1e-6,
    )
    assert_close(views(view)[0], np.isin(np.arange(encoding.width), seen), 0)
    # As if it had the inputs that it sees, and no others.
    alone, found = Network.mlp(len(seen), (5,), 2).prior(), views.prior(network.prior(), view)
    for layer in (0, 1):
        assert_close(found.scale[layer]["weight"], alone.scale[layer]["weight"], 1e-6)


def test_linear_networks_see_by_the_skip_alone():
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    encoding = PiecewiseLinear.learn(inputs, 4)
    network, rows = Network.mlp(encoding.width, (5,), 2, "tanh", skip=True), encoding(inputs)
    views, view, theta = Views.of(network, encoding), View(True, True), network.init(key(0))
    theta[0]["bias"], theta[1]["bias"] = jnp.arange(5.0), jnp.arange(2.0)
    outputs, bins = network.apply(views.pruned(theta, view), rows), rows[:, 3:]
    assert_close(outputs, bins @ theta[1]["skip"][3:] + jnp.arange(2.0)[None], 1e-5)
    found = views.prior(network.prior(), view)
    assert_close(found.scale[1]["skip"], np.sqrt(2 / bins.shape[1]), 1e-6)
    assert_close(found.scale[0]["weight"], network.prior().scale[0]["weight"], 1e-6)


def test_where_all_see_all_there_are_no_views():
    assert Views.of(Network.mlp(3, (5,), 2), None) is None
    assert Views.of(Network.mlp(3, (5,), 2, skip=True), None) is not None


def widened(noise, rows, rng, deviations=1.0):
    """Densities of y ~ N(0, noise²), for every spread of laws N(0, deviations²), whose typical one is 1:
    (1, spread, row)."""
    factors, powers = SPREADS.T[:, :, None]
    scales = factors * np.broadcast_to(deviations, rows) ** powers
    return scipy.stats.norm.logpdf(noise * rng.normal(size=rows), scale=scales)[None]


@pytest.mark.few(1)
@pytest.mark.parametrize(("least", "most"), [(0.4, 1.0), (1.0, 2.5)])
def test_the_spread_is_that_of_the_data(least, most):
    """With δ = log(f/noise), n rows lose about δ² each: the estimate of log f has a standard error of
    1/√(2n), and is shrunk towards 0 by 50/(n + 50)."""
    rows, rng, step = 5_000, np.random.default_rng(0), np.log(FACTORS[1] / FACTORS[0])
    found = []
    for noise in np.exp(rng.uniform(np.log(least), np.log(most), size=100)):
        choice = chosen(widened(noise, rows, rng))
        found.append(np.log(choice.spread[0]) - np.log(noise) * rows / (rows + 50))
        assert choice.spread[1] == 1.0, "where all rows are alike, the power says nothing"
    mean, error = monte_carlo(found)
    # The factors are a grid. 1/n for what was neglected.
    assert_within(0.0, mean, error + 1 / rows)
    assert np.std(found) < 1.3 * np.hypot(1 / np.sqrt(2 * rows), step / np.sqrt(12))


@pytest.mark.parametrize(("truth", "power"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_the_power_is_that_of_the_data(truth, power):
    """Deviations that differ by a factor of 20, of which the data know all, half or nothing."""
    rng = np.random.default_rng(0)
    deviations = np.exp(rng.uniform(-1.5, 1.5, size=2_000))
    choice = chosen(widened(deviations**truth, 2_000, rng, deviations))
    assert choice.spread[1] == power
    assert abs(np.log(choice.spread[0])) < 0.1


@pytest.mark.parametrize("rows", [10, 50, 2_000])
def test_few_rows_hardly_move_the_spread(rows):
    """log f maximises −log f − ⟨y²⟩/(2f²) − (50/n)(log f)²; without the last term, ten rows would choose it
    by chance, with a standard error of 0.22."""

    def best(square, believed):
        return scipy.optimize.minimize_scalar(
            lambda log: log + square * np.exp(-2 * log) / 2 + believed / rows * log**2, (-1.0, 2.0)
        ).x

    step, misses = np.log(FACTORS[1] / FACTORS[0]), {50: [], 0: []}
    for seed in range(20):
        found = np.log(chosen(widened(2.0, rows, np.random.default_rng(seed))).spread[0])
        square = np.mean((2.0 * np.random.default_rng(seed).normal(size=rows)) ** 2)
        for believed, of_all in misses.items():
            of_all.append(abs(found - best(square, believed)))
    # The best of a grid is one of the two factors beside the optimum.
    assert max(misses[50]) < step
    # Mutant: nothing is believed.
    assert rows > 100 or max(misses[0]) > 3 * step


def test_spreads_are_those_of_the_candidate_that_is_chosen():
    rng = np.random.default_rng(0)
    wide, narrow = widened(2.0, 500, rng), widened(0.5, 500, rng)
    for pair, best in (([wide, narrow], 1), ([narrow, wide], 0)):
        choice = chosen(np.concatenate(pair))
        assert choice.parts == (TRIALS[best],)
        assert abs(np.log(choice.spread[0] / 0.5)) < 0.25


def test_no_spread_is_among_the_spreads():
    assert tuple(SPREADS[0]) == NO_SPREAD == (1.0, 1.0)
    assert np.min(np.abs(np.log(FACTORS))) < 1e-9
    assert len(SPREADS) == 1 + len(FACTORS) * len(POWERS)

    # 40 a row, in whole blocks at least.
    assert steps_for(1, 100, classes=False) == steps_for(100, 100, classes=False) == 4_000
    assert steps_for(200, 100, classes=False) == 8_000
    assert steps_for(1, 100, classes=True) == 800
    assert steps_for(250, 100, classes=False) == steps_for(500, 100, classes=False) == 10_000
    assert steps_for(1_000, 100, classes=False) == 20_000
    assert steps_for(100_000, 100, classes=False) == 60_000
    assert steps_for(100_000, 40_000, classes=False) == 30_000
    assert steps_for(19_999, 100, classes=False, simple=False) == 24_000
    assert steps_for(20_000, 100, classes=False, simple=False) == 12_000
    assert steps_for(40, 100, classes=True) == 1_600
    assert steps_for(400, 100, classes=True) == 2_000
    assert steps_for(1_400, 100, classes=True) == 2_800
    assert steps_for(10**6, 100, classes=True) == 60_000
    assert steps_for(10**6, 10**9, classes=True) == 500


def test_batch_sizes():
    assert [batch_size_for(rows) for rows in (1, 1_999, 2_000, 10**6)] == [50, 50, 100, 100]
    sizes = [batch_size_for(rows, simple=False) for rows in (1_999, 19_999, 20_000, 10**6)]
    assert sizes == [50, 100, 500, 500]
    assert batch_size_for(20_000, classes=True, simple=False) == 100


def test_candidates_go_by_method_and_rows():
    others = {"DE": WITHOUT_ENTROPY, "DRE": WITHOUT_ENTROPY, "PrO": SCORED_TOGETHER} | {
        "posterior": (Candidate(1.0),)
    }
    for name, method in METHODS.items():
        expected = others.get(name, WITH_ENTROPY)
        assert Recipe(method).candidates(FEWEST_TO_CHOOSE) == expected
        assert Recipe(method).candidates(FEWEST_TO_CHOOSE - 1) == (Candidate(1.0),)
        assert Recipe(method, prior_weight=0.2).candidates(10**6) == (Candidate(0.2),)


# The step size


def test_cosine_decay():
    schedule = CosineDecay(jnp.asarray(0.2), jnp.asarray(400.0))
    steps = jnp.arange(601)
    expected = np.where(
        steps <= 400, 0.1 * (1 + np.cos(np.pi * np.minimum(np.asarray(steps, np.float64), 400) / 400)), 0.0
    )
    assert_close(jax.vmap(schedule)(steps), expected, 1e-6)
    assert float(schedule(jnp.asarray(0))) == np.float32(0.2)
    assert float(schedule(jnp.asarray(400))) == float(schedule(jnp.asarray(10**6))) == 0.0


def test_cosine_decays_of_different_lengths_side_by_side():
    peaks, lengths = jnp.asarray([0.1, 1.0]), jnp.asarray([10.0, 1_000.0])
    values = jax.vmap(lambda *numbers: CosineDecay(*numbers)(jnp.asarray(10)))(peaks, lengths)
    assert_close(values, [0.0, 0.5 * (1 + np.cos(np.pi / 100))], 1e-6)


# Tables


def a_table(rows, columns=2, seed=0, weights=None):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, columns)).astype(np.float32)
    targets = (inputs @ np.arange(1, columns + 1) + rng.normal(size=rows)).astype(np.float32)
    weights = np.ones(rows) if weights is None else np.asarray(weights, np.float64)
    return Table.of(inputs, targets, weights)


def test_weights_have_mean_one_and_stand_for_cases():
    table = a_table(4, weights=[1, 2, 3, 6])
    assert_close(table.weights, np.array([1, 2, 3, 6]) / 3, 1e-12)
    assert table.cases == 12


def test_some_rows_stand_for_their_own_cases():
    part = a_table(4, weights=[1, 2, 3, 6]).rows(np.array([3, 1]))
    assert_close(part.weights, [1.5, 0.5], 1e-12)
    assert part.cases == pytest.approx(8)
    assert np.all(part.inputs == a_table(4).inputs[[3, 1]])
    assert np.all(part.targets == a_table(4).targets[[3, 1]])
    assert part.rows(np.array([0])).cases == pytest.approx(6)


def test_padding_leaves_weighted_means_as_they_were():
    rng = np.random.default_rng(0)
    tables = [a_table(rows, seed=rows, weights=rng.integers(1, 5, rows)) for rows in (7, 4, 1)]
    inputs, targets, weights = stacked(tables, 8)
    assert inputs.shape == (3, 8, 2)
    assert targets.shape == weights.shape == (3, 8)
    for i, table in enumerate(tables):
        values = np.sin(3 * np.asarray(targets[i], np.float64)) + np.asarray(inputs[i, :, 0], np.float64)
        own = np.sin(3 * table.targets.astype(np.float64)) + table.inputs[:, 0]
        assert_close(np.average(values, weights=weights[i]), np.average(own, weights=table.weights), 1e-6)
        assert_close(np.sum(weights[i]), len(table.weights), 1e-6)
        assert np.all(np.isfinite(np.asarray(inputs[i]))), "also rows that do not count are numbers"


def test_tables_have_few_sizes():
    rows = np.arange(1, 40_000)
    sizes = np.array([few_sizes(int(n)) for n in rows])
    assert np.all(sizes >= rows)
    assert np.max(sizes / rows) <= 1.125
    assert len(set(sizes)) < 130
    assert few_sizes(350) == few_sizes(352) == 352


def test_trials_of_deep_networks_are_short():
    assert trial_steps_for(4_000, simple=True) == 4_000
    assert trial_steps_for(4_000, simple=False) == 1_000
    assert trial_steps_for(60_000, simple=True) == 20_000


def test_held_out_rows_count_for_what_they_stand_for():
    """Also in a fold that holds the heavy ones: not as many rows of mean weight 1."""
    weights = np.repeat([1.0, 100.0], [20, 10])
    cut = folds_of([Table.of(np.arange(30.0)[:, None], np.arange(30.0), weights)], key(0))
    order = np.concatenate([fold.held_out.targets for fold in cut]).astype(int)
    assert np.allclose(held_out_weights(cut, 0), weights[order])


@pytest.mark.parametrize(
    ("score", "length", "learns_on"),
    [(-1.0, 0.25, False), (-0.8, 1.0, False), (0.9, 1.0, True), (1.1, 2.0, True)],
)
def test_the_noise_of_targets_says_how_long_to_train(score, length, learns_on):
    """By the best of what was chosen: what was not says nothing."""
    warm, cold, other = (Trial(0, Candidate(*numbers)) for numbers in ((1.0,), (0.03, 0.25), (3.0,)))
    choice = Choice((warm, cold), scores={warm: score, cold: score - 1, other: score + 5})
    assert choice.length(0.25, 2.0) == length
    assert choice.learns_on == learns_on
    assert choice.length(1.0, 1.0) == 1.0
    assert [part.candidate.steps for part in choice.stretched(2.0).parts] == [2.0, 0.5]
    assert choice.stretched(2.0).scores == choice.scores


def test_shares_of_steps_that_are_given_stay_in_proportion():
    """Where steps are given, the longest take them all: 2 and 0.5 are 1 and 0.25."""
    trials = [Trial(0, Candidate(1.0, 2.0))] * 4 + [Trial(0, Candidate(1.0, 0.5))] * 4
    assert [part.candidate.steps for part in parts_given(columns_of(trials))] == [2.0, 0.5]
    within = parts_given(columns_of(trials), longest=False)
    assert [part.candidate.steps for part in within] == [1.0, 0.25]
    short = columns_of([Trial(0, Candidate(1.0, 0.25))] * 4)
    assert [part.candidate.steps for part in parts_given(short, longest=False)] == [0.25]
    assert np.all(of_all_steps(short)["share_of_steps"] == 1)


def test_calls_of_their_own_are_what_one_call_is():
    """Every ensemble (table, trial) with its table, keys among the arguments."""

    def method(state, chosen_key, table, factor):
        return {"moved": state + factor * table.sum() + jax.random.normal(chosen_key)}

    states = jnp.arange(12.0).reshape(2, 3, 2)
    keys = jax.random.split(jax.random.key(0), (2, 3))
    tables, shared = (jnp.asarray([[1.0, 2.0], [5.0, 7.0]]),), (jnp.asarray(10.0),)
    alone = SideBySide(at_once=False)(method, (states, keys), apart(tables), shared)
    together = SideBySide(at_once=True)(method, (states, keys), tables, shared)
    assert_close(alone["moved"], together["moved"], 1e-6)
    noise = jax.vmap(jax.vmap(jax.random.normal))(keys)[..., None]
    expected = states + noise + jnp.asarray([30.0, 120.0])[:, None, None]
    assert_close(alone["moved"], expected, 1e-6)


def test_calls_see_the_settings_of_their_thread():
    """Threads do not know what `with jax.enable_x64()` says."""
    states, keys = jnp.zeros((2, 3)), jax.random.split(jax.random.key(0), (2, 3))

    def method(state, chosen_key):
        return state + jax.random.normal(chosen_key, dtype=float)

    run = SideBySide(at_once=False)
    assert run(method, (states, keys)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert SideBySide(at_once=False)(method, (states.astype(float), keys)).dtype == jnp.float64


# The problems


def linear(columns=2):
    return Network.mlp(columns, (), 1)


class Summed(NegativeLogLikelihood):
    """A loss that is easy to add up."""

    def __init__(self):
        self.network, self.likelihood = linear(), unit_normal

    def __call__(self, theta, batch):
        return jnp.sum(batch)


def test_statement():
    """V, W and τ of every method; J = 3, and the prior is N(0, 1)."""
    prior = linear().prior()
    theta, other = prior.sample(key(0), 2), prior.sample(key(1), 2)
    theta, other = (jax.tree.map(lambda leaf: leaf[0], draws) for draws in (theta, other))
    w = jnp.asarray(0.3, jnp.float32)
    problems = {}
    for name, method in METHODS.items():
        plan = Plan.of(Summed(), prior, None, Recipe(method), rows=2)
        problems[name] = method.problem(plan.setting(jnp.asarray([0.3, 100.0, 0.0, 0.0, 0.0])))
    batch = jnp.asarray([2.0, 5.0])
    for method, problem in problems.items():
        energy = problem.free_energy(batch)
        if method in ("DE", "DRE"):
            assert energy.temperature is None
        else:
            assert energy.temperature == w
        if method == "PrO":
            (score,) = [term for _, term in problem.objective.terms()]
            assert isinstance(score, LogScore)
            assert isinstance(score.loss, Summed)
            assert energy.interaction is None
            assert_close(energy.potential(theta), -0.3 * prior.log_density(theta), 1e-6)
        elif method in ("DE", "DLE", "FD-GVI", "posterior"):
            assert energy.interaction is None
            assert_close(energy.potential(theta), 7 - 0.3 * prior.log_density(theta), 1e-6)
        else:
            leaves = (jax.tree.leaves(theta), jax.tree.leaves(other))
            gap = np.concatenate([(a - b).ravel() for a, b in zip(*leaves, strict=True)])
            kernel = np.exp(-np.sum(gap**2) / (2 * 3))
            assert_close(energy.interaction(theta, other), 2 * (0.5 * 3 * 0.3) * kernel, 1e-5)


# Training, where the answer is known


def unit_normal(outputs):
    return dist.Normal(outputs[..., 0], 1.0)


def ridge(table, prior_weight):
    """The minimiser of (1/n)Σ wᵢ½(yᵢ − f(xᵢ))² + (λ/n)‖θ/s‖²/2, n = Σ wᵢ, and s² = 2/2 = 1."""
    x = np.column_stack([np.ones(len(table.inputs)), table.inputs.astype(np.float64)])
    w = table.weights * table.cases / len(table.weights)
    precision = x.T @ (w[:, None] * x) / prior_weight + np.eye(3)
    return np.linalg.solve(precision, x.T @ (w * table.targets) / prior_weight), precision


def coefficients(particles):
    """(particle, 3): bias, weights."""
    (layer,) = particles
    return np.concatenate([np.asarray(layer["bias"]), np.asarray(layer["weight"])[..., 0]], axis=-1)


def trained(tables, method, key_, **settings):
    network = linear()
    settings = {"particles": 3, "prior_weight": 20.0, "batch_size": 10**6} | settings
    return trainer(network, Recipe(METHODS[method], **settings), len(tables), 4_000).fit(tables, key_)


def trainer(network, recipe, tables, steps):
    loss = NegativeLogLikelihood(network, unit_normal)
    model = Model(Shape((), 0), loss, network.prior(), steps, steps)
    return Trainer([(model,)] * tables, recipe)


def stacked_coefficients(found):
    return np.stack([coefficients(one.particles) for one in found.of_tables])


def test_deep_ensembles_reach_ridge_regression():
    """Every table its own: its rows, its weights, its n. Shorter ones are padded."""
    rng = np.random.default_rng(0)
    tables = [
        a_table(12, seed=1),
        a_table(30, seed=2),
        a_table(20, seed=3, weights=rng.integers(1, 10, 20)),
    ]
    found = trained(tables, "DE", key(0))
    for table, theta in zip(tables, stacked_coefficients(found), strict=True):
        expected, _ = ridge(table, 20.0)
        assert np.linalg.norm(expected - ridge(table, 1e-9)[0]) > 0.3, "the prior shrinks"
        for particle in theta:
            assert_close(particle, expected, 2e-3)
    assert [one.choice for one in found.of_tables] == [Choice((Trial(0, Candidate(20.0)),))] * 3
    assert [one.steps for one in found.of_tables] == [4_000] * 3
    assert [one.planned for one in found.of_tables] == [4_000] * 3


def test_parts_of_an_ensemble_reach_what_each_is_asked_for():
    """Two of them with other prior weights, in one program."""
    table, weights = a_table(30, seed=2), (20.0, 200.0)
    choice = Choice(tuple(Trial(0, Candidate(weight)) for weight in weights))
    recipe = Recipe(METHODS["DE"], particles=6, batch_size=10**6)
    found = trainer(linear(), recipe, 1, 4_000).fit([table], key(0), given=[choice])
    theta = stacked_coefficients(found)[0]
    assert theta.shape == (6, 3)
    for part, weight in zip((theta[:3], theta[3:]), weights, strict=True):
        expected, _ = ridge(table, weight)
        assert_close(part, np.broadcast_to(expected, (3, 3)), 2e-3)
    assert np.linalg.norm(ridge(table, 20.0)[0] - ridge(table, 200.0)[0]) > 0.3


def test_batches_reach_the_same():
    """Batches of half the rows jitter, and the step size ends at 0: the mean over tables that are equal."""
    tables = [a_table(40, seed=1, weights=np.arange(1, 41))] * 12
    found = stacked_coefficients(trained(tables, "DE", key(0), batch_size=20))
    expected, _ = ridge(tables[0], 20.0)
    mean, error = monte_carlo(found.mean(axis=1))
    assert np.all(error < 0.05)
    assert_within(expected, mean, error)


def test_parametric_inference_reaches_the_best_gaussian():
    """The mean-field minimiser of KL has the posterior's mean, and the diagonal of its precision."""
    table = a_table(30, seed=2, weights=np.arange(1, 31))
    (found,) = stacked_coefficients(trained([table], "FD-GVI", key(0), particles=1_000, prior_weight=100.0))
    mean, precision = ridge(table, 100.0)
    deviation = 1 / np.sqrt(np.diag(precision))
    assert np.all(deviation < 0.5), "narrower than the prior"
    assert_within(mean, *monte_carlo(found), errors=6)
    assert_within(np.log(found.std(axis=0) / deviation), 0.0, 1 / np.sqrt(2_000), errors=6)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_log_densities_are_those_of_the_widened_mixture(power):
    network, likelihood = Network.mlp(2, (3,), 2), Heteroscedastic(smallest_scale=1e-3)
    prior, table = network.prior(), a_table(6)
    plan = Plan.of(NegativeLogLikelihood(network, likelihood), prior, None, Recipe(METHODS["DE"]), rows=6)
    particles, factors = prior.sample(key(3), 4), np.array([0.5, 1.0, 2.0])
    spreads = np.stack([factors, np.full(3, power)], axis=1)
    rows = jnp.asarray(table.inputs), jnp.asarray(table.targets), jnp.asarray(table.weights)
    densities, typical = plan.log_densities(jnp.asarray(spreads, jnp.float32), particles, *rows)
    outputs = np.asarray(jax.vmap(network.apply, (0, None))(particles, rows[0]), np.float64)
    locations, scales = outputs[..., 0], np.log1p(np.exp(outputs[..., 1])) + 1e-3
    levels = [0.5 - np.pi / 100, 0.5 + np.pi / 100]
    ends = mf.Mixture(dist.Normal(locations.T, scales.T)).quantile(levels)
    centre = np.asarray(ends, np.float64).mean(axis=0)
    deviations = np.sqrt(np.mean(scales**2, axis=0) + np.var(locations, axis=0))
    assert_close(typical, np.exp(np.mean(np.log(deviations))), 1e-5)
    for factor, density in zip(factors, np.asarray(densities), strict=True):
        widen = factor * (deviations / float(typical)) ** (power - 1)
        of_members = scipy.stats.norm.logpdf(
            table.targets, centre + widen * (locations - centre), widen * scales
        )
        assert_close(density, scipy.special.logsumexp(of_members, axis=0) - np.log(4), 1e-4)
    (as_it_is,), _ = plan.log_densities(None, particles, *rows)
    if power == 1:
        assert_close(as_it_is, densities[1], 1e-5)


def test_rows_that_fill_a_table_up_are_not_typical():
    """Those of weight 0, whose laws are far wider."""
    network, likelihood = Network.mlp(2, (3,), 2), Heteroscedastic(smallest_scale=1e-3)
    prior, table = network.prior(), a_table(6)
    plan = Plan.of(NegativeLogLikelihood(network, likelihood), prior, None, Recipe(METHODS["DE"]), rows=6)
    particles, spreads = prior.sample(key(3), 4), jnp.ones((1, 2))
    inputs = jnp.asarray(table.inputs).at[4:].multiply(100.0)
    targets = jnp.asarray(table.targets)
    _, alone = plan.log_densities(spreads, particles, inputs[:4], targets[:4], jnp.ones(4))
    _, filled = plan.log_densities(spreads, particles, inputs, targets, jnp.ones(6).at[4:].set(0.0))
    _, mutant = plan.log_densities(spreads, particles, inputs, targets, jnp.ones(6))
    assert_close(filled, alone, 1e-5)
    assert mutant > 1.5 * alone


def test_log_densities_of_classes_are_those_of_the_tempered_mixture():
    network, likelihood = Network.mlp(2, (3,), 3), Categorical(classes=3)
    prior, table = network.prior(), a_table(6)
    plan = Plan.of(NegativeLogLikelihood(network, likelihood), prior, None, Recipe(METHODS["DE"]), rows=6)
    particles, classes = prior.sample(key(3), 4), np.array([0, 1, 2, 0, 1, 2], np.int32)
    rows = jnp.asarray(table.inputs), jnp.asarray(classes), jnp.asarray(table.weights)
    densities, _ = plan.log_densities(jnp.asarray([[0.5, 1.0], [3.0, 1.0]]), particles, *rows)
    logits = np.asarray(jax.vmap(network.apply, (0, None))(particles, rows[0]), np.float64)
    for temperature, density in zip((0.5, 3.0), np.asarray(densities), strict=True):
        of_members = scipy.special.log_softmax(logits / temperature, axis=-1)[:, np.arange(6), classes]
        assert_close(density, scipy.special.logsumexp(of_members, axis=0) - np.log(4), 1e-5)


def test_the_temperature_is_that_of_the_data():
    """Networks that are three times as sure as they should be. Rows say how far, in standard errors."""
    rng, rows = np.random.default_rng(0), 4_000
    logits = rng.normal(size=(rows, 3))
    classes = np.array([rng.choice(3, p=p) for p in scipy.special.softmax(logits, axis=1)])
    temperatures = TEMPERATURES[:, 0, None, None]
    densities = scipy.special.log_softmax(3 * logits / temperatures, axis=-1)[:, np.arange(rows), classes]
    spread = chosen(densities[None]).spread

    # The standard error is by the Fisher information of log t at the truth: the variance of the logits.
    p = scipy.special.softmax(logits, axis=1)
    information = np.sum(np.sum(p * logits**2, axis=1) - np.sum(p * logits, axis=1) ** 2)
    assert spread[1] == 1.0
    assert abs(np.log(spread[0] / 3)) < 4 / np.sqrt(information) + np.log(FACTORS[1] / FACTORS[0])


def test_choosing_on_tables_of_many_and_few_rows():
    """One table is cut into a single fold, the others into three: to each its own held-out rows."""
    network = linear()
    few, many = a_table(MANY - 1, seed=1), a_table(MANY, seed=2)
    noisy = many._replace(targets=(3 * np.random.default_rng(3).normal(size=MANY)).astype(np.float32))
    # Half its rows are noisy, and weigh a ninth of the others: 1 and 9 with shares 0.9 and 0.1.
    half = np.arange(MANY - 1) < MANY // 2
    mixed = few.inputs @ np.arange(1, 3) + np.where(half, 3, 1) * np.random.default_rng(4).normal(
        size=MANY - 1
    )
    weighted = Table.of(few.inputs, mixed.astype(np.float32), np.where(half, 1.0, 9.0))
    recipe = Recipe(METHODS["DE"], batch_size=50, step_size=0.05)
    found = trainer(network, recipe, 3, 500).fit([few, noisy, weighted], key(0))
    for one, variance in zip(found.of_tables, (1, 9, 1.8), strict=True):
        scores = one.choice.scores
        assert len(scores) == len(WITHOUT_ENTROPY)
        # That of the truth, N(f(x), 1), where the noise has this variance.
        best = -0.5 * np.log(2 * np.pi) - 0.5 * variance
        assert max(scores.values()) == pytest.approx(best, abs=5 * variance / np.sqrt(2 * MANY / 10))


def test_laws_are_as_wide_as_training_for_all_steps_makes_them_need():
    """In a few of the steps little is learned by heart, in all of them much: of targets whose noise is small
    beside them. The mutant is what a model of one layer has: the width that suits its trials."""
    rng, rows = np.random.default_rng(0), 60
    inputs = rng.normal(size=(rows, 4)).astype(np.float32)
    targets = (inputs[:, 0] + rng.normal(size=rows)).astype(np.float32)
    table = Table.of(inputs, targets, np.ones(rows))
    network, law = Network.mlp(4, (16, 16), 2, "tanh"), Heteroscedastic(smallest_scale=1e-2)
    method = dataclasses.replace(METHODS["DE"], candidates=(Candidate(1e-3), Candidate(2e-3)))
    found, ends = {}, {}
    for name, hidden in (("all steps", (16, 16)), ("mutant", (16,))):
        loss, prior = NegativeLogLikelihood(network, law), network.prior()
        volume = {"log_volume": lambda y: np.full(len(y), np.log(100))}
        model = Model(Shape(hidden, 0), loss, prior, 1_600, 100, spreads=SPREADS, **volume)
        recipe, runs = Recipe(method, particles=4, batch_size=10**6), []

        def noted(trials, end, what, runs=runs):
            runs.append((trials.numbers.shape[0], end))
            return drive(trials, end)

        (found[name],) = chosen_on_folds([(model,)], recipe, [table], key(0), noted)
        ends[name] = runs
    assert ends == {"all steps": [(3, 100), (3, 1_600)], "mutant": [(3, 100)]}
    assert found["mutant"].parts == found["all steps"].parts
    assert found["all steps"].spread[0] > 1.5 * found["mutant"].spread[0]


@pytest.mark.parametrize("longest", [1.0, 2.0])
def test_of_many_rows_one_fold_says_how_wide_laws_must_be(longest):
    """It is trained for all steps, also where the ensemble will take more. And tables that are mostly noise
    are trained no longer than their trials."""
    network, runs = linear(), []
    tables = [a_table(rows, seed=rows) for rows in (FEW - 1, FEW)]
    noise = np.random.default_rng(0).normal(size=FEW).astype(np.float32)
    tables.append(tables[1]._replace(targets=noise))
    loss = NegativeLogLikelihood(network, unit_normal)
    # The noise of targets is 1: no score is above 0. For two tables, as if it were a hundredth.
    volume = [lambda y: np.full(len(y), np.log(100))] * 2 + [None]
    models = [
        (Model(Shape((2, 2), 0), loss, network.prior(), 80, 20, lengths=(0.25, longest), log_volume=one),)
        for one in volume
    ]
    recipe = Recipe(METHODS["DE"], batch_size=10**6, step_size=0.05)

    def noted(trials, end, what):
        runs.append((trials.numbers.shape[0], end))
        return drive(trials, end)

    choices = chosen_on_folds(models, recipe, tables, key(0), noted)
    assert runs == [(9, 20), (4, 80)]
    trials = [{share * one.steps for one in WITHOUT_ENTROPY} for share in (0.25, longest)]
    for choice, shares in zip(choices, (trials[1], trials[1], trials[0]), strict=True):
        assert {part.candidate.steps for part in choice.parts} <= shares


def test_of_very_many_rows_the_fold_is_trained_for_as_long_as_the_ensemble():
    network, runs = linear(), []
    table = a_table(MANY, seed=1)
    loss = NegativeLogLikelihood(network, unit_normal)
    volume = {"log_volume": lambda y: np.full(len(y), np.log(100))}
    model = Model(Shape((2, 2), 0), loss, network.prior(), 80, 20, lengths=(0.25, 2.0), **volume)
    recipe = Recipe(METHODS["DE"], batch_size=100, step_size=0.05)

    def noted(trials, end, what):
        runs.append((trials.numbers.shape[0], end))
        return drive(trials, end)

    chosen_on_folds([(model,)], recipe, [table], key(0), noted)
    assert runs == [(1, 20), (1, 160)]


# Stopping early


def looks(tables, end, scores):
    """Early stopping, its members numbered by the looks, and `scores` those of every look."""
    seen = []

    def members():
        seen.append(len(seen) + 1)
        return {"leaf": jnp.full((len(tables), 1, 3), float(seen[-1]))}

    def log_densities(members, tables):
        return [
            np.full((1, 1, len(table.weights)), score)
            for table, score in zip(tables, scores(seen[-1]), strict=True)
        ]

    return Best(SimpleNamespace(members=members, log_densities=log_densities), tables, end)


def test_the_best_seen_is_kept_for_every_table():
    scores = [[0.0, 0.0], [1.0, -1.0], [np.nan, 2.0], [0.5, 1.0]]
    best = looks([a_table(2, weights=[1, 3]), a_table(2)], 100_000, lambda look: scores[look - 1])
    for look in range(1, 5):
        assert not best(look * best.interval, {}, None)
        assert not best(look * best.interval + 1, {}, None), "no look in between"
    assert np.asarray(best.members["leaf"])[:, 0, 0].tolist() == [2.0, 3.0]
    assert best.steps == [2 * best.interval, 3 * best.interval]
    assert best.scores.tolist() == [1.0, 2.0]


def test_stopping_waits_for_every_table():
    """One improves at every look, until it no longer does; then patience runs out."""
    best, look = looks([a_table(2), a_table(2)], 10**6, lambda look: [min(look, 15.0), 0.0]), 1
    while not best(look * best.interval, {}, None):
        look += 1
    assert look == 15 + PATIENCE
    assert best.steps == [15 * best.interval, best.interval]


def test_validation_rows_are_weighted():
    table = a_table(2, weights=[1, 3])
    trials = SimpleNamespace(
        members=lambda: {"leaf": jnp.zeros((1, 1, 1))},
        log_densities=lambda members, tables: [np.array([[[1.0, 2.0]]])],
    )
    best = Best(trials, [table], 1_000)
    best(best.interval, {}, None)
    assert_close(best.scores, [1.75], 1e-12)


def test_a_run_is_looked_at_when_it_ends():
    best = looks([a_table(2)], 300, lambda look: [0.0])
    best(100, {}, None)
    assert best.members is None
    best(300, {}, None)
    assert best.steps == [300]
