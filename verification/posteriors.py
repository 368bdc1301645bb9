"""Well-known kinds of posteriors, by `mf.sample` beside NUTS: `python -m verification.posteriors`.

The truth is a long run of NUTS in double precision (`--truth`), whose moments are stored in posteriors.json
with its R̂. A posterior is *met* where every mean is within 0.1 standard deviations and every standard
deviation within 10%.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS

import measureflow as mf

STORED = Path(__file__).with_name("posteriors.json")
RNG = np.random.default_rng(0)
EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools_centred() -> None:
    """Effects of coaching in eight schools (Rubin, 1981), centred: a funnel."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([8]))
    numpyro.sample("y", dist.Normal(theta, ERRORS), obs=EFFECTS)


def eight_schools() -> None:
    """The same, non-centred."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([8]))
    numpyro.sample("y", dist.Normal(mu + tau * z, ERRORS), obs=EFFECTS)


_MIXING = np.eye(25) + 4 * RNG.normal(size=(25, 3)) @ RNG.normal(size=(3, 25))
_X25 = RNG.normal(size=(200, 25)) @ _MIXING
_Y25 = _X25 @ RNG.normal(size=25) + 0.5 * RNG.normal(size=200)


def correlated_regression() -> None:
    """25 coefficients of inputs that are nearly collinear."""
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([25]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(_X25 @ beta, sigma), obs=_Y25)


_X8 = np.c_[np.ones(300), 3 * RNG.normal(size=(300, 7))]
_Y8 = (RNG.random(300) < 1 / (1 + np.exp(-_X8 @ RNG.normal(size=8)))).astype(int)


def logistic_regression() -> None:
    """Eight coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 2.5).expand([8]))
    numpyro.sample("y", dist.Bernoulli(logits=_X8 @ beta), obs=_Y8)


_T20 = np.linspace(0, 1, 20)
_COUNTS = RNG.poisson(np.exp(1.5 + np.sin(6 * _T20)))


def poisson_process() -> None:
    """A Gaussian process as log intensity, at 20 points."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    length = numpyro.sample("length", dist.InverseGamma(5, 1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([20]))
    distance = jnp.square(_T20[:, None] - _T20[None])
    kernel = scale**2 * jnp.exp(-0.5 * distance / length**2) + 1e-4 * jnp.eye(20)
    level = numpyro.sample("level", dist.Normal(0, 2))
    numpyro.sample("y", dist.Poisson(jnp.exp(level + jnp.linalg.cholesky(kernel) @ z)), obs=_COUNTS)


def _simulated_garch(n: int = 200) -> np.ndarray:
    found, variance, y = [], 1.0, 0.0
    for _ in range(n):
        variance = 0.3 + 0.3 * y**2 + 0.5 * variance
        y = np.sqrt(variance) * RNG.normal()
        found.append(y)
    return np.array(found)


_GARCH = _simulated_garch()


def garch() -> None:
    """GARCH(1, 1)."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    omega = numpyro.sample("omega", dist.HalfNormal(1))
    alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
    beta = numpyro.sample("beta", dist.Uniform(0, 1))

    def step(variance: Array, y: Array) -> tuple:
        new = omega + alpha * (y - mu) ** 2 + (1 - alpha) * beta * variance
        return new, variance

    _, variances = jax.lax.scan(step, jnp.asarray(1.0), jnp.asarray(_GARCH))
    numpyro.sample("y", dist.Normal(mu, jnp.sqrt(variances)), obs=_GARCH)


_RETURNS = RNG.normal(size=60) * np.exp(0.5 * np.cumsum(0.25 * RNG.normal(size=60)))


def stochastic_volatility() -> None:
    """A volatility that walks, over 60 days."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    level = numpyro.sample("level", dist.Normal(0, 1))
    phi = numpyro.sample("phi", dist.Beta(20, 1.5))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([60]))
    _, path = jax.lax.scan(lambda h, e: (phi * h + sigma * e,) * 2, jnp.asarray(0.0), z)
    numpyro.sample("y", dist.Normal(0, jnp.exp(0.5 * (level + path))), obs=_RETURNS)


_STATES = np.cumsum(RNG.random(150) < 0.1) % 2
_EMITTED = np.where(_STATES == 0, -1.0, 1.5) + 0.7 * RNG.normal(size=150)


def hidden_markov() -> None:
    """Two states, summed out."""
    stay = numpyro.sample("stay", dist.Beta(8, 2).expand([2]))
    low = numpyro.sample("low", dist.Normal(0, 2))
    gap = numpyro.sample("gap", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    log_emission = dist.Normal(jnp.stack([low, low + gap]), sigma).log_prob(jnp.asarray(_EMITTED)[:, None])
    log_move = jnp.log(jnp.stack([jnp.stack([stay[0], 1 - stay[0]]), jnp.stack([1 - stay[1], stay[1]])]))

    def step(alpha: Array, emission: Array) -> tuple:
        return jax.nn.logsumexp(alpha[:, None] + log_move, axis=0) + emission, None

    alpha, _ = jax.lax.scan(step, log_emission[0] - jnp.log(2.0), log_emission[1:])
    numpyro.factor("likelihood", jax.nn.logsumexp(alpha))


def two_modes() -> None:
    """0.8/0.2 at distance 6, in two dimensions."""
    x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    first = jnp.log(0.8) - 0.5 * jnp.sum(jnp.square(x + jnp.array([3.0, 0.0])))
    second = jnp.log(0.2) - 0.5 * jnp.sum(jnp.square(x - jnp.array([3.0, 0.0])))
    numpyro.factor("density", jnp.logaddexp(first, second))


_X15 = RNG.normal(size=(80, 15))
_Y15 = _X15[:, 0] * 2 - _X15[:, 1] + 0.5 * RNG.normal(size=80)


def horseshoe() -> None:
    """A sparse regression."""
    tau = numpyro.sample("tau", dist.HalfCauchy(0.2))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([15]))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([15]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(_X15 @ (z * local * tau), sigma), obs=_Y15)


def _predator_prey(rates: Array, start: Array, steps: int = 100, size: float = 0.2) -> Array:
    def slope(x: Array) -> Array:
        return jnp.stack([rates[0] * x[0] - rates[1] * x[0] * x[1], rates[2] * x[0] * x[1] - rates[3] * x[1]])

    def step(x: Array, _: None) -> tuple:
        a = slope(x)
        b = slope(x + size / 2 * a)
        c = slope(x + size / 2 * b)
        d = slope(x + size * c)
        x = jnp.maximum(x + size / 6 * (a + 2 * b + 2 * c + d), 1e-6)
        return x, x

    return jax.lax.scan(step, start, None, length=steps)[1][4::5]


_RATES = np.array([0.55, 0.028, 0.024, 0.8])
_HUNTED = np.exp(
    np.log(np.asarray(_predator_prey(jnp.asarray(_RATES), jnp.array([30.0, 4.0]))))
    + 0.2 * RNG.normal(size=(20, 2))
)


def lotka_volterra() -> None:
    """A differential equation, by Runge and Kutta."""
    rates = numpyro.sample("rates", dist.LogNormal(jnp.log(jnp.array([0.5, 0.03, 0.03, 0.8])), 0.5))
    start = numpyro.sample("start", dist.LogNormal(jnp.log(jnp.array([30.0, 5.0])), 0.5))
    sigma = numpyro.sample("sigma", dist.LogNormal(-1, 0.7).expand([2]))
    numpyro.sample("y", dist.LogNormal(jnp.log(_predator_prey(rates, start)), sigma), obs=_HUNTED)


_XNET = np.linspace(-2, 2, 60)[:, None]
_YNET = np.sin(2 * _XNET[:, 0]) + 0.2 * RNG.normal(size=60)


def network() -> None:
    """One hidden layer of 166: 498 weights. They have symmetries: predictions are compared."""
    first = numpyro.sample("first", dist.Normal(0, 1).expand([1, 166]))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([166]))
    second = numpyro.sample("second", dist.Normal(0, 1).expand([166]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))
    mean = numpyro.deterministic("prediction", jnp.tanh(_XNET @ first + bias) @ second / jnp.sqrt(166.0))
    numpyro.sample("y", dist.Normal(mean, sigma), obs=_YNET)


_COUNTY = RNG.integers(0, 20, size=300)
_RADON = 1.3 + 0.4 * RNG.normal(size=20)[_COUNTY] + 0.8 * RNG.normal(size=300)


def radon() -> None:
    """Levels of 20 counties, centred, with data enough for it."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(mu, tau).expand([20]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(level[_COUNTY], sigma), obs=_RADON)


_TWO = np.where(RNG.random(120) < 0.4, -1.2, 1.6) + 0.8 * RNG.normal(size=120)


def mixture() -> None:
    """Two Gaussians, the lower one first."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    low = numpyro.sample("low", dist.Normal(0, 3))
    gap = numpyro.sample("gap", dist.HalfNormal(3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]))
    parts = dist.Normal(jnp.stack([low, low + gap]), sigma).log_prob(jnp.asarray(_TWO)[:, None])
    numpyro.factor("y", jnp.sum(jnp.logaddexp(jnp.log(share) + parts[:, 0], jnp.log1p(-share) + parts[:, 1])))


_ABILITY, _ITEM = np.repeat(np.arange(40), 12), np.tile(np.arange(12), 40)
_ANSWERS = (
    RNG.random(480) < 1 / (1 + np.exp(-(RNG.normal(size=40)[_ABILITY] - RNG.normal(size=12)[_ITEM])))
).astype(int)


def item_response() -> None:
    """Abilities of 40 people, difficulty and discrimination of 12 questions."""
    ability = numpyro.sample("ability", dist.Normal(0, 1).expand([40]))
    difficulty = numpyro.sample("difficulty", dist.Normal(0, 1.5).expand([12]))
    slope = numpyro.sample("slope", dist.LogNormal(0, 0.5).expand([12]))
    logits = slope[_ITEM] * (ability[_ABILITY] - difficulty[_ITEM])
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=_ANSWERS)


DEVELOPED = [
    eight_schools_centred,
    eight_schools,
    correlated_regression,
    logistic_regression,
    poisson_process,
    garch,
    two_modes,
    horseshoe,
    network,
    radon,
    mixture,
]
#: Never a reason to change a setting.
ASIDE = [stochastic_volatility, hidden_markov, lotka_volterra, item_response]
MODELS = {model.__name__: model for model in (*DEVELOPED, *ASIDE)}
#: What is compared, where it is not every site.
COMPARED = {"network": ["prediction", "sigma"]}


def moments(name: str, constrained: dict) -> dict[str, list]:
    """Means and standard deviations of every compared number, of draws (case, ...)."""
    names = COMPARED.get(name) or sorted(constrained)
    rows = np.concatenate(
        [np.asarray(constrained[n], np.float64).reshape(len(constrained[n]), -1) for n in names], axis=1
    )
    if name in ("eight_schools_centred", "eight_schools", "horseshoe"):
        # Heavy tails: of what has no variance to speak of, the logarithm.
        rows = np.sign(rows) * np.log1p(np.abs(rows))
    return {"mean": rows.mean(axis=0).tolist(), "sd": rows.std(axis=0).tolist()}


#: Known in closed form, where chains of NUTS do not cross.
KNOWN = {"two_modes": {"mean": [-1.8, 0.0], "sd": [float(np.sqrt(1 + 9 * 0.64)), 1.0]}}
#: Truths that take smaller steps than others, and one whose gradients are dear.
_CAREFUL = {"eight_schools_centred": 0.99, "horseshoe": 0.995, "poisson_process": 0.95}
_DEAR = ("lotka_volterra", "network")


class Run(NamedTuple):
    """Moments, and what they cost: CPU seconds, compiling included, and gradients one after the other."""

    found: dict[str, list]
    seconds: float
    gradients: int
    notes: list[str]


def truth(name: str) -> dict:
    """Moments by a long run of NUTS, and whether it can be believed."""
    kernel = NUTS(MODELS[name], target_accept_prob=_CAREFUL.get(name, 0.9), dense_mass=name != "network")
    warmup, draws = (400, 600) if name in _DEAR else (2_000, 8_000) if name == "horseshoe" else (1_000, 3_000)
    mcmc = _chains(kernel, warmup, draws, seed=5)
    worst = max(float(np.nanmax(gelman_rubin(x))) for x in mcmc.get_samples(group_by_chain=True).values())
    diverging = float(np.mean(mcmc.get_extra_fields()["diverging"]))
    return {**moments(name, mcmc.get_samples()), "diverging": diverging, "r_hat": worst}


def _chains(kernel: NUTS, warmup: int, draws: int, seed: int) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=4,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), extra_fields=("num_steps", "diverging"))
    return mcmc


def nuts(name: str, known: dict) -> Run:
    """NUTS as it comes, four chains; the shortest of some runs that meets the truth, if one does."""
    for draws in (250, 500, 1_000, 2_000):
        began = time.process_time()
        try:
            mcmc = _chains(NUTS(MODELS[name]), draws, draws, seed=0)
        except ValueError as error:
            # NumPyro checks the parameters of every law at the place where a chain begins.
            return Run({}, time.process_time() - began, 0, [f"NUTS: {error}"])
        seconds, steps = time.process_time() - began, mcmc.get_extra_fields()["num_steps"]
        # Warm-up takes about as many as the draws.
        run = Run(moments(name, mcmc.get_samples()), seconds, 2 * int(np.sum(steps)) // 4, [])
        if met(known, run.found):
            return run
    return run._replace(notes=["not met"])


def ours(name: str, seed: int = 0, particles: int = 1_000) -> tuple[Run, mf.Sample]:
    """Moments by `mf.sample`, with what it warned of; and the sample."""
    model = mf.from_numpyro(MODELS[name])
    start_key, key = jax.random.split(jax.random.key(seed))
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mf.sample(model.problem, model.initial(start_key, particles), key)
    seconds = time.process_time() - began
    found = moments(name, model.constrained(result.measure.particles))
    return Run(found, seconds, result.gradients, [str(w.message) for w in caught]), result


def errors(known: dict, found: dict) -> tuple[float, float]:
    """The largest error of a mean, in standard deviations, and of a standard deviation, relative."""
    sd = np.array(known["sd"])
    of_mean = np.abs(np.array(found["mean"]) - np.array(known["mean"])) / sd
    return float(of_mean.max()), float(np.abs(np.array(found["sd"]) / sd - 1).max())


def met(known: dict, found: dict) -> bool:
    """Whether all means are within 0.1 standard deviations and all standard deviations within 10%."""
    return max(errors(known, found)) < 0.1


def main(names: list[str]) -> None:
    """The table of docs/posteriors.md."""
    stored = (json.loads(STORED.read_text()) if STORED.exists() else {}) | KNOWN
    for name in names or MODELS:
        if name not in stored:
            sys.stderr.write(f"{name}: no truth stored; python -m verification.posteriors --truth {name}\n")
            continue
        run, _ = ours(name)
        of_mean, of_sd = errors(stored[name], run.found)
        cells = [name, "yes" if met(stored[name], run.found) else "no", "yes" if run.notes else "no"]
        cells += [f"{of_mean:.2f}", f"{of_sd:.0%}", f"{run.seconds:.0f}", f"{run.gradients:,}"]
        other = nuts(name, stored[name])
        cells += ["no" if other.notes else "yes", f"{other.seconds:.0f}", f"{other.gradients:,}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        for text in run.notes:
            sys.stderr.write(f"    {text}\n")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--truth"]:
        jax.config.update("jax_enable_x64", True)
        for name in arguments[1:] or list(MODELS):
            known = json.loads(STORED.read_text()) if STORED.exists() else {}
            known[name] = truth(name)
            STORED.write_text(json.dumps(known))
            sys.stderr.write(f"{name}: R̂ {known[name]['r_hat']:.3f}\n")
    else:
        main(arguments)
