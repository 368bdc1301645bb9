"""What Hypothesis draws: pytrees, weights, kernels, measures, particles, statements, mixtures, tables.

Numbers are multiples of ¼ of size 2 or less. So sums, translations and products with powers of two are exact
in float32, and two particles are either equal or at least ¼ apart: what a tolerance has to cover is the
library's own rounding, not the condition of an unlucky example. Shapes come from short lists, since every
new shape is a new program.
"""

import dataclasses

import equinox as eqx
import hypothesis.extra.numpy as arrays_of
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import measureflow as mf

# Shapes of one particle.
VECTOR = {"vector": (3,)}
SMALL = {"matrix": (2, 1), "scalar": (), "vector": (2,)}  # J = 5: distances coordinate by coordinate
WIDE = {"matrix": (3, 2), "vector": (3,)}  # J = 9: distances from inner products
FEATURES = 3

#: Not Python's integers, each of which would be a program of its own.
seeds = st.integers(0, 2**16).map(np.uint32)
#: Weights, scales, lengthscales: from ½ to 2.
positive = st.integers(4, 16).map(lambda k: np.float32(k / 8))
#: Factors that change no digit of a float.
powers_of_two = st.integers(-3, 3).map(lambda k: np.float32(2.0**k))


def arrays(shape, low=-2.0, high=2.0, step=0.25):
    """Multiples of `step`. Every entry is drawn: equal entries are rare, but they come."""
    count = st.integers(round(low / step), round(high / step))
    drawn = arrays_of.arrays(np.int64, shape, elements=count, fill=st.nothing())
    return drawn.map(lambda k: np.asarray(k * step, np.float32))


def trees(shapes, *leading, **limits):
    """A dictionary of arrays, each with `leading` axes in front."""
    return st.fixed_dictionaries(
        {name: arrays((*leading, *shape), **limits) for name, shape in shapes.items()}
    )


@st.composite
def particles(draw, shapes, n):
    """n particles; in every second case, or so, two of them coincide."""
    drawn = draw(trees(shapes, n))
    if draw(st.booleans()):
        for leaf in drawn.values():
            leaf[1] = leaf[0]
    return drawn


radial_kernels = st.one_of(
    st.builds(mf.SquaredExponential, positive),
    st.builds(mf.Matern, st.sampled_from([0.5, 1.5, 2.5]), positive),
    st.builds(mf.InverseMultiquadric, positive),
)


class Sum(eqx.Module):
    """The numbers of a kernel with a cusp plus one with heavy tails: one program for all of them.

    Made a kernel by the checks: a type checker that looks at one entry of a tuple chooses it by chance, and
    Hypothesis forbids chance of others.
    """

    weights: tuple
    lengthscales: tuple

    def kernel(self):
        (a, b), (rough, heavy) = self.weights, self.lengthscales
        return a * mf.Matern(0.5, rough) + b * mf.InverseMultiquadric(heavy)


sums = st.builds(Sum, st.tuples(positive, positive), st.tuples(positive, positive))


@st.composite
def gaussians(draw, shapes, kind=None):
    """Scales: one number, one per coordinate, or a triangular matrix that is far from singular."""
    kind = kind or draw(st.sampled_from(["number", "pytree", "matrix"]))
    mean, size = draw(trees(shapes)), sum(int(np.prod(shape)) for shape in shapes.values())
    if kind == "number":
        return mf.Gaussian(mean, draw(positive))
    if kind == "pytree":
        return mf.Gaussian(mean, draw(trees(shapes, low=0.5, high=2.0)))
    below = np.tril(draw(arrays((size, size), low=-0.25, high=0.25)), -1)
    return mf.Gaussian(mean, below + np.diag(draw(arrays((size,), low=0.75, high=2.0))))


@st.composite
def gaussian_pairs(draw, shapes):
    """Two, with scales of different kinds or two matrices."""
    kinds = [("number", "pytree"), ("pytree", "matrix"), ("matrix", "number"), ("matrix", "matrix")]
    return tuple(draw(gaussians(shapes, kind)) for kind in draw(st.sampled_from(kinds)))


class Bowl(eqx.Module):
    """ℓ(θ) = a(½‖θ − c‖² + sin Σ(θ − c)): bounded below, not convex, and all coordinates meet."""

    centre: dict
    factor: jax.Array

    def __call__(self, theta):
        away = jax.tree.leaves(jax.tree.map(jnp.subtract, theta, self.centre))
        squares = sum(jnp.sum(jnp.square(leaf)) for leaf in away)
        return self.factor * (0.5 * squares + jnp.sin(sum(jnp.sum(leaf) for leaf in away)))


class Statement(eqx.Module):
    """The parts of a problem, the particles it meets, an order for them and a direction to move them."""

    loss: Bowl
    prior: mf.Gaussian
    atoms: dict
    smooth: mf.SquaredExponential
    rough: Sum
    mmd: jax.Array
    kl: jax.Array
    particles: dict
    order: jax.Array
    direction: dict

    def repulsion(self):
        """MMD² to the prior in closed form, and to atoms."""
        to_prior = self.mmd * mf.SquaredMMD(self.prior, self.smooth)
        return to_prior + self.mmd * mf.SquaredMMD(mf.Empirical(self.atoms), self.rough.kernel())

    def repulsive(self):
        """τ = 0."""
        return mf.Problem(self.loss, self.repulsion())

    def problem(self):
        return mf.Problem(self.loss, self.repulsion() + self.kl * mf.KL(self.prior))

    def permuted(self):
        return dataclasses.replace(self, particles=reordered(self.particles, self.order))

    def moved(self, by):
        """All of it translated."""
        here = (self.loss.centre, self.prior.mean, self.atoms, self.particles)
        there = jax.tree.map(
            lambda x, b: x + b.reshape((1,) * (x.ndim - b.ndim) + b.shape), here, (by, by, by, by)
        )
        centre, mean, atoms, points = there
        return dataclasses.replace(
            self,
            loss=Bowl(centre, self.loss.factor),
            prior=mf.Gaussian(mean, self.prior.scale),
            atoms=atoms,
            particles=points,
        )

    def scaled(self, factor):
        """L times a number."""
        loss = Bowl(self.loss.centre, factor * self.loss.factor)
        return dataclasses.replace(self, loss=loss, mmd=factor * self.mmd, kl=factor * self.kl)

    def ravelled(self):
        """The same, θ one vector."""
        scale = jax.tree.map(jnp.broadcast_to, self.prior.scale, jax.tree.map(jnp.shape, self.prior.mean))
        return dataclasses.replace(
            self,
            loss=Bowl(ravelled(self.loss.centre), self.loss.factor),
            prior=mf.Gaussian(ravelled(self.prior.mean), ravelled(scale)),
            atoms=jax.vmap(ravelled)(self.atoms),
            particles=jax.vmap(ravelled)(self.particles),
            direction=jax.vmap(ravelled)(self.direction),
        )


def reordered(tree, order):
    return jax.tree.map(lambda leaf: leaf[order], tree)


def ravelled(tree):
    """All leaves as one vector, in the order of their names."""
    return jnp.concatenate([jnp.reshape(leaf, (-1,)) for leaf in jax.tree.leaves(tree)])


@st.composite
def statements(draw, sizes=((SMALL, 5), (WIDE, 4))):
    """Problems and particles: `sizes` are the shapes of one particle, and how many there are."""
    shapes, n = draw(st.sampled_from(sizes))
    drawn = Statement(
        loss=Bowl(draw(trees(shapes)), draw(positive)),
        prior=draw(gaussians(shapes, "pytree")),
        atoms=draw(trees(shapes, 3)),
        smooth=mf.SquaredExponential(draw(positive)),
        rough=draw(sums),
        mmd=draw(positive),
        kl=draw(positive),
        particles=draw(particles(shapes, n)),
        order=np.array(draw(st.permutations(range(n)))),
        direction=draw(trees(shapes, n)),
    )
    return jax.tree.map(jnp.asarray, drawn)


@st.composite
def normals(draw, rows=3, n=4):
    """Means and deviations of a mixture, (rows, particles)."""
    return draw(arrays((rows, n))), draw(arrays((rows, n), low=0.25, high=2.0))


@st.composite
def regression_data(draw, rows):
    """(X, y, w): X of FEATURES columns, and weights 1, 2, 3, 1, … in some order."""
    weights = draw(st.permutations([1 + k % 3 for k in range(rows)]))
    return draw(arrays((rows, FEATURES))), draw(arrays((rows,))), np.array(weights, np.float32)
