"""What every contender gets: the same network, cases, particles and target. Plain JAX, and nothing of
measureflow.

The target is q* ∝ exp(−ℓ/τ) p with p = N(0, 1) in every coordinate, and a step is

    θ ← θ − η(∇ℓ(θ) − τ∇log p(θ)) + √(2ητ) Z.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TEMPERATURE = 0.01
STEP_SIZE = 1e-3


class Target(NamedTuple):
    """`loss(theta, data)` is the mean over the cases of `data`; `particles` have a leading axis."""

    title: str
    loss: Callable[[Any, Any], jax.Array]
    data: tuple[jax.Array, jax.Array]
    particles: Any


def regression(particles: int, sizes: tuple[int, ...] = (8, 50, 1), cases: int = 100) -> Target:
    """Networks of the size that the UCI sets are compared with, and the mean squared error."""
    x = jax.random.normal(jax.random.key(1), (cases, sizes[0]))
    y = jnp.sum(jnp.sin(x), axis=1, keepdims=True)
    return _target(particles, sizes, cases, squared_error, (x, y))


def classification(particles: int, sizes: tuple[int, ...] = (784, 512, 512, 10), cases: int = 512) -> Target:
    """Networks as for small pictures, and the mean cross entropy."""
    x = jax.random.normal(jax.random.key(1), (cases, sizes[0]))
    y = jax.random.randint(jax.random.key(2), (cases,), 0, sizes[-1])
    return _target(particles, sizes, cases, cross_entropy, (x, y))


def residual(
    particles: int, inputs: int = 784, width: int = 1024, blocks: int = 9, cases: int = 4096
) -> Target:
    """Residual networks of 10⁷ parameters that compute in bfloat16, and the mean cross entropy."""
    x = jax.random.normal(jax.random.key(1), (cases, inputs), jnp.bfloat16)
    y = jax.random.randint(jax.random.key(2), (cases,), 0, 10)
    sizes = ((inputs, width), *((width, width),) * blocks, (width, 10))

    def one(key):
        keys = jax.random.split(key, len(sizes))
        return [layer for k, pair in zip(keys, sizes, strict=True) for layer in start(k, pair)]

    stacked = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), particles))
    number = sum(leaf[0].size for leaf in jax.tree.leaves(stacked))
    title = f"{particles} residual networks of {number:,} parameters, batch {cases}"
    return Target(title, residual_cross_entropy, (x, y), stacked)


def residual_cross_entropy(theta, data):
    """Particles are float32; the network, and so its gradient, is bfloat16."""
    x, y = data
    first, *blocks, last = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), theta)
    x = x @ first["weight"] + first["bias"]
    for layer in blocks:
        size = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True) + 1e-6)
        x = x + jax.nn.relu((x * size.astype(x.dtype)) @ layer["weight"] + layer["bias"])
    log_probabilities = jax.nn.log_softmax((x @ last["weight"] + last["bias"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], axis=1))


def network(theta: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in theta[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ theta[-1]["weight"] + theta[-1]["bias"]


def squared_error(theta, data):
    x, y = data
    return jnp.mean((network(theta, x) - y) ** 2)


def cross_entropy(theta, data):
    x, y = data
    log_probabilities = jax.nn.log_softmax(network(theta, x))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], axis=1))


def start(key: jax.Array, sizes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """One network, its weights drawn so that signals keep their size."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(k, (m, n)) * np.sqrt(1 / m).astype(np.float32), "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def drift(target: Target) -> Any:
    """−∇ℓ + τ∇log p at the particles: what every contender's step has to follow."""

    def log_target(theta):
        log_prior = -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(theta))
        return TEMPERATURE * log_prior - target.loss(theta, target.data)

    return jax.jit(jax.vmap(jax.grad(log_target)))(target.particles)


def disagreement(found: Any, expected: Any) -> float:
    """The largest difference, in units of the largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    errors, sizes = [], []
    for one, other in pairs:
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        errors.append(np.max(np.abs(one.reshape(other.shape) - other)))
        sizes.append(np.max(np.abs(other)))
    return float(max(errors) / max(sizes))


def _target(particles, sizes, cases, loss, data):
    many = jax.jit(jax.vmap(lambda key: start(key, sizes)))
    stacked = many(jax.random.split(jax.random.key(0), particles))
    shown = "-".join(str(size) for size in sizes)
    return Target(f"{particles} networks {shown}, batch {cases}", loss, data, stacked)
