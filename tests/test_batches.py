"""Which cases the loss sees: every epoch a fresh permutation, computed a batch at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from measureflow.batches import Shuffled, permuted

KEYS = jax.random.split(jax.random.key(0), 6_000)


def permutations(n, keys=KEYS, rule=permuted):
    return np.asarray(jax.jit(jax.vmap(lambda key: rule(jnp.arange(n), n, key)))(keys))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 277, 1_000])
def test_it_is_a_permutation(n):
    assert np.array_equal(np.sort(permutations(n, KEYS[:50]), axis=1), np.tile(np.arange(n), (50, 1)))


def test_large_numbers_of_cases_do_not_overflow():
    n = 2_000_000_011
    rows = np.asarray(permuted(jnp.arange(n - 500, n), n, jax.random.key(1)))
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(set(rows.tolist())) == 500
    assert stats.kstest(rows / n, "uniform").pvalue > 1e-3


def test_a_part_is_a_part_of_the_whole():
    whole = permuted(jnp.arange(100), 100, jax.random.key(2))
    assert np.array_equal(permuted(jnp.arange(40, 60), 100, jax.random.key(2)), whole[40:60])


def p_values(found):
    """Of all 120 permutations of five being equally likely, and of the places of the first two of 30."""
    codes = found["five"] @ 5 ** np.arange(5)
    counts = np.unique(codes, return_counts=True)[1]
    counts = np.concatenate([counts, np.zeros(120 - len(counts), int)])
    pairs = np.bincount(found["thirty"][:, 0] * 30 + found["thirty"][:, 1], minlength=900).reshape(30, 30)
    return stats.chisquare(counts).pvalue, stats.chisquare(pairs[~np.eye(30, dtype=bool)]).pvalue


def test_all_permutations_are_equally_likely():
    assert min(p_values({"five": permutations(5), "thirty": permutations(30)})) > 1e-4


def test_that_test_has_power():
    """A permutation of few rounds, and a shift, which is one too, are not random enough."""

    def shifted(positions, n, key):
        return (positions + jax.random.randint(key, (), 0, n)) % n

    assert min(p_values({"five": permutations(5), "thirty": permutations(30, rule=shifted)})) < 1e-10
    biased = permutations(5).copy()
    biased[:150] = np.arange(5)
    assert min(p_values({"five": biased, "thirty": permutations(30)})) < 1e-10


def test_an_epoch_shows_every_case_once_and_the_next_in_another_order():
    batches, key = Shuffled(jnp.arange(23), 5), jax.random.key(3)
    seen = [np.concatenate([batches.at(jnp.asarray(4 * e + b), key) for b in range(4)]) for e in range(3)]
    assert all(len(set(epoch.tolist())) == 20 for epoch in seen)
    assert not np.array_equal(seen[0], seen[1])
    assert len(set(np.concatenate(seen).tolist())) == 23  # what is left out is not always the same
