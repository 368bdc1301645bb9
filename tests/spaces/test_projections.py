"""Random projections: what they keep, and what becomes of measures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, key, rows

import measureflow as mf
from measureflow.spaces.embeddings import push_forward
from measureflow.statement.free_energy import FreeEnergy

SHAPES = {"weight": (40, 30), "bias": (30,), "scale": ()}
COUNT = 101


def points(number, seed=0):
    keys = dict(zip(SHAPES, jax.random.split(key(seed), len(SHAPES)), strict=True))
    return {name: jax.random.normal(keys[name], (number, *shape)) for name, shape in SHAPES.items()}


def test_squared_distances_are_kept_on_average_with_the_error_that_is_said():
    one, number = jax.tree.map(lambda leaf: leaf[0], points(1)), 400
    keys = jax.random.split(key(1), number)
    project = jax.jit(jax.vmap(lambda k: mf.RandomProjection(k, COUNT)(one)))
    ratios = np.sum(np.square(project(keys)), axis=1) / np.sum(rows(points(1)) ** 2)
    said = np.sqrt(2 / COUNT)
    assert abs(ratios.mean() - 1) < 4 * said / np.sqrt(number)
    # The relative error of a standard deviation from so many draws is 1/√(2·number).
    assert abs(ratios.std() / said - 1) < 4 / np.sqrt(2 * number) + 2 / COUNT


def test_a_projection_is_the_sum_that_it_says():
    one, projection = jax.tree.map(lambda leaf: leaf[0], points(1)), mf.RandomProjection(key(2), 7)
    flat = rows(points(1))[0]
    matrix = np.asarray(jax.jacfwd(projection)(one)["weight"]).reshape(7, -1)
    assert np.array_equal(np.abs(matrix).sum(axis=0), np.ones(matrix.shape[1]))
    bare = [flat[b::7].sum() for b in range(7)]
    assert_close(projection.summed(one, signed=False), bare, 1e-5)
    # Leaves share the count: the first coordinate of the weights is coordinate 31 of θ.
    assert np.flatnonzero(matrix[:, 0]) == [31 % 7]


def test_the_law_of_the_features_of_a_gaussian():
    one = jax.tree.map(lambda leaf: leaf[0], points(1))
    prior = mf.Gaussian(one, jax.tree.map(lambda leaf: 0.5 + jnp.abs(leaf), one))
    projection, number = mf.RandomProjection(key(3), 5), 4000
    law = push_forward(projection, prior)
    drawn = np.asarray(jax.vmap(projection)(prior.sample(key(4), number)))
    deviations = np.asarray(law.scale)
    assert np.all(np.abs(drawn.mean(0) - law.mean) < 4.5 * deviations / np.sqrt(number))
    assert np.all(np.abs(drawn.std(0) / deviations - 1) < 4.5 / np.sqrt(2 * number))
    correlations = np.corrcoef(drawn.T)[np.triu_indices(5, 1)]
    assert np.all(np.abs(correlations) < 4.5 / np.sqrt(number))


def test_repulsion_in_projections_is_the_gradient_of_its_energy():
    one = jax.tree.map(lambda leaf: leaf[0], points(1))
    kernel = mf.SquaredExponential(30.0).on(mf.RandomProjection(key(5), COUNT))
    energy: FreeEnergy = mf.SquaredMMD(mf.Gaussian(one, 1.0), kernel).free_energy()
    particles = points(3, seed=6)
    found = energy.wasserstein_gradient(particles)
    expected = jax.grad(lambda x: 3 * energy.energy(x))(particles)
    assert_close(rows(found), rows(expected), 1e-4)


def test_bad_counts():
    with pytest.raises(ValueError, match="RandomProjection count"):
        mf.RandomProjection(key(0), 0)
    with pytest.raises(ValueError, match="1021 numbers of 4 coordinates"):
        mf.RandomProjection(key(0))(jnp.zeros(4))
