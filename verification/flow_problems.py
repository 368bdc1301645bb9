"""The problems on which flows are compared, each with its exact answer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import measureflow as mf
from measureflow.study.beyond import mean_field_langevin
from measureflow.study.paper.multimodal import GRID, INITIAL, statements

EXACT = 20_000
# Of the small network: hidden units, the deviation of noise, and where its functions are compared.
WIDTH, NOISE, SEEN_AT = 10, 0.3, jnp.linspace(-1.5, 1.5, 16)


class Case(NamedTuple):
    """A problem, where its particles start, and draws of its minimiser; in what coordinates particles are
    compared with these, if not in their own; and the unit of its step sizes."""

    problem: mf.Problem
    start: Callable[[jax.Array, int], jax.Array]
    draws: np.ndarray
    view: Callable[[np.ndarray], np.ndarray] = lambda found: found
    unit: float = 1.0

    @property
    def exact(self) -> np.ndarray:
        """The draws, as they are compared."""
        return self.view(self.draws)


def _normal(dimension: int, scale: float = 1.0) -> Callable[[jax.Array, int], jax.Array]:
    return mf.Gaussian(jnp.zeros(dimension), scale).sample


def two_basins() -> Case:
    """Figure 2: the quartic loss, P = N(0, 1), KL weight 1."""
    problem = mf.Problem(mf.theory.quartic_loss, mf.KL(mf.Gaussian(jnp.zeros(1), 1.0)))
    grid = np.linspace(-5.0, 4.0, 9_001)
    law = mf.theory.GridLaw(grid, mf.theory.minimiser(problem, grid))
    return Case(problem, _normal(1), law.sample(np.random.default_rng(0), (EXACT, 1)))


def four_modes() -> Case:
    """Figure 3: DRLE, with its interaction."""
    kernel = mf.SquaredExponential(mf.median_heuristic(INITIAL.sample(jax.random.key(0), 1000)))
    problem = statements(kernel)["DRLE"]
    points, mass = GRID.reshape(-1, 2), mf.theory.minimiser(problem, GRID).reshape(-1)
    rng = np.random.default_rng(0)
    drawn = points[rng.choice(len(points), EXACT, p=mass / mass.sum())]
    # Anywhere in their cells.
    cell = GRID[1, 1] - GRID[0, 0]
    return Case(problem, INITIAL.sample, drawn + cell * rng.uniform(-0.5, 0.5, drawn.shape))


def correlated() -> Case:
    """N(0, Σ) in 20 dimensions, condition number 100."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    deviations = np.geomspace(0.2, 2.0, 20)
    precision = jnp.asarray((axes / deviations**2) @ axes.T, jnp.float32)
    problem = mf.Problem(lambda theta: 0.5 * theta @ precision @ theta, mf.KL(mf.Flat()))
    return Case(problem, _normal(20), rng.normal(size=(EXACT, 20)) * deviations @ axes.T)


def funnel() -> Case:
    """v ~ N(0, 1.5²) and four x ~ N(0, exp(v))."""

    def loss(theta: jax.Array) -> jax.Array:
        v, x = theta[0], theta[1:]
        return v**2 / 4.5 + 0.5 * jnp.sum(x**2) * jnp.exp(-v) + 2 * v

    rng = np.random.default_rng(0)
    v = 1.5 * rng.normal(size=(EXACT, 1))
    exact = np.concatenate([v, np.exp(v / 2) * rng.normal(size=(EXACT, 4))], axis=1)
    return Case(mf.Problem(loss, mf.KL(mf.Flat())), _normal(5), exact)


def mean_field_network() -> Case:
    """A two-layer network of infinite width, θ where a unit bends: its squared error is a function of a mean
    over Q."""
    problem, grid = mean_field_langevin.stated(), mean_field_langevin.GRID
    law = mf.theory.GridLaw(grid, mf.theory.minimiser(problem, grid))
    start = mean_field_langevin.PRIOR.sample
    return Case(problem, start, law.sample(np.random.default_rng(0), (EXACT, 1)))


def outputs(theta: jax.Array, inputs: jax.Array) -> jax.Array:
    """f(x) = (2/√10) Σₖ vₖ tanh(2(wₖx + bₖ)) + c: a network 1-10-1."""
    w, b, v = theta[:-1].reshape(3, WIDTH)
    return jnp.tanh(2 * (inputs[:, None] * w + b)) @ v * (2 / WIDTH**0.5) + theta[-1]


def small_network(chains: int = 8) -> Case:
    """24 rows of a sine with a gap, Normal noise of known size, P = N(0, 1) for all 31 weights. Networks
    whose units are swapped are the same function, so what is compared is f(x) at 16 inputs. The answer is a
    long run of NUTS, which mixes well there: of 20,000 draws the least effective number is 18,700."""
    rng = np.random.default_rng(0)
    seen = np.concatenate([rng.uniform(-1, -0.2, 12), rng.uniform(0.3, 1, 12)])
    inputs = jnp.asarray(seen, jnp.float32)
    targets = jnp.asarray(np.sin(3 * seen) + NOISE * rng.normal(size=24), jnp.float32)

    def loss(theta: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum((targets - outputs(theta, inputs)) ** 2) / NOISE**2

    @jax.jit
    def functions(found: jax.Array) -> jax.Array:
        return jax.vmap(lambda theta: outputs(theta, SEEN_AT))(found)

    def view(found: np.ndarray) -> np.ndarray:
        return np.asarray(functions(jnp.asarray(found, jnp.float32)), np.float64)

    prior = mf.Gaussian(jnp.zeros(3 * WIDTH + 1), 1.0)
    draws = _by_nuts(lambda theta: loss(theta) - prior.log_density(theta), 3 * WIDTH + 1, chains)
    # Its curvature is about 2,000.
    return Case(mf.Problem(loss, mf.KL(prior)), prior.sample, draws, view, unit=2.0**-5)


def _by_nuts(potential: Callable[[Any], Any], dimension: int, chains: int) -> np.ndarray:
    from numpyro.infer import MCMC, NUTS

    key = jax.random.key(0)
    nuts = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=1_000,
        num_samples=EXACT // 8,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(key, init_params=jax.random.normal(key, (chains, dimension)))
    return np.asarray(nuts.get_samples(), np.float64)


def two_modes() -> Case:
    """0.8 N(−5, 1) + 0.2 N(5, 1), and a start that has half of its mass in each."""

    def loss(theta: jax.Array) -> jax.Array:
        x = theta[0]
        return -jnp.logaddexp(jnp.log(0.8) - 0.5 * (x + 5) ** 2, jnp.log(0.2) - 0.5 * (x - 5) ** 2)

    def start(key: jax.Array, particles: int) -> jax.Array:
        sides = jnp.where(jnp.arange(particles)[:, None] % 2 == 0, -5.0, 5.0)
        return sides + jax.random.normal(key, (particles, 1))

    rng = np.random.default_rng(0)
    sides = np.where(rng.uniform(size=(EXACT, 1)) < 0.8, -5.0, 5.0)
    return Case(mf.Problem(loss, mf.KL(mf.Flat())), start, sides + rng.normal(size=(EXACT, 1)))


CASES = {
    "two basins": two_basins,
    "four modes, repulsion": four_modes,
    "correlated, 20-D": correlated,
    "funnel, 5-D": funnel,
    "small Bayesian network": small_network,
    "mean-field network": mean_field_network,
}
