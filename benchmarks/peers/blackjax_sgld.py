"""BlackJAX's SGLD: https://blackjax-devs.github.io/blackjax (sgmcmc.sgld; "Sample with multiple chains",
"vmap the chains"; the speed-up guide's one jitted `scan`).

Its target is exp(−ℓ/τ) p, so that a step of size ητ is ours of size η.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.guests import needed
from benchmarks.targets import STEP_SIZE, TEMPERATURE, Target


class Peer:
    """BlackJAX on a target."""

    def __init__(self, target: Target):
        self.target, self.blackjax = target, needed("blackjax")
        cases = len(target.data[0])

        def log_prior(theta):
            return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(theta))

        def log_likelihood(theta, case):
            one = jax.tree.map(lambda leaf: leaf[None], case)
            return -target.loss(theta, one) / (TEMPERATURE * cases)

        self.gradient = self.blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, cases)

    def drift(self) -> Any:
        gradients = jax.jit(jax.vmap(self.gradient, (0, None)))(self.target.particles, self.target.data)
        return jax.tree.map(lambda leaf: TEMPERATURE * leaf, gradients)

    def run(self, steps: int) -> Callable[[], Any]:
        sgld = self.blackjax.sgld(self.gradient)
        chains = len(jax.tree.leaves(self.target.particles)[0])

        @jax.jit
        def sample(key, states, data):
            def step(states, key):
                keys = jax.random.split(key, chains)
                move = jax.vmap(sgld.step, in_axes=(0, 0, None, None))
                return move(keys, states, data, STEP_SIZE * TEMPERATURE), None

            return jax.lax.scan(step, states, jax.random.split(key, steps))[0]

        states = jax.vmap(sgld.init)(self.target.particles)
        return lambda: sample(jax.random.key(2), states, self.target.data)
