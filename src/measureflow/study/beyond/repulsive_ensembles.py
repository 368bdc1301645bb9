"""Repulsive deep ensembles (D'Angelo and Fortuin, 2021): networks that repel one another, in the space of
weights or of functions, by a kernel density (WGD, f-WGD) or by Stein's flow (SVGD, f-SVGD) in the place of
noise.

The figures are of regression on a line with a gap, and of classes in the plane. An ensemble should be sure
where there are data and diverse where there are none. The yardstick is the posterior, by a longer run of the
kinetic flow with noise.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jaxtyping import Array
from tqdm import tqdm

from measureflow.flows.entropies import KernelDensity
from measureflow.flows.flow import AbstractFlow
from measureflow.flows.kinetic import KineticFlow
from measureflow.flows.stein import SteinFlow
from measureflow.flows.wasserstein import WassersteinFlow
from measureflow.runs.loop import run
from measureflow.spaces.bandwidths import MedianBandwidth
from measureflow.spaces.measures import Gaussian
from measureflow.statement.divergences import KL
from measureflow.statement.problem import Problem
from measureflow.study.paper.claims import Claim, Reproduction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, MEMBERS, NOISE, LEARNING_RATE = 30, 20, 0.15, 0.02
YARDSTICK = "posterior"
LINE = np.linspace(-3.0, 3.0, 121)
PLANE = np.stack(np.meshgrid(*[np.linspace(-6.0, 6.0, 41)] * 2, indexing="ij"), axis=-1)
CENTRES = np.array([[-2.0, -1.0], [2.0, -1.0], [0.0, 2.0]])
SHOWN = ("DE", "WGD", "f-WGD", "f-SVGD", YARDSTICK)


class Task(NamedTuple):
    """Rows, the mean negative log-likelihood of a network, where functions are compared, and where seen."""

    inputs: np.ndarray
    targets: np.ndarray
    loss: Callable[[Any], Array]
    prior: Gaussian
    anchors: Array
    points: Array


def network(theta: Any, inputs: Array) -> Array:
    """One layer of tanh."""
    return jnp.tanh(inputs @ theta["w"] + theta["b"]) @ theta["v"] + theta["c"]


def _prior(inputs: int, outputs: int) -> Gaussian:
    shapes = {"w": (inputs, HIDDEN), "b": (HIDDEN,), "v": (HIDDEN, outputs), "c": (outputs,)}
    scales = {"w": 1.5, "b": 1.5, "v": 2 / HIDDEN**0.5, "c": 1.0}
    mean = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return Gaussian(mean, {name: jnp.full(shapes[name], scale) for name, scale in scales.items()})


def regression(rng: np.random.Generator) -> Task:
    """Two clusters on the line, and nothing between."""
    x = np.concatenate([rng.uniform(-1.6, -0.8, 20), rng.uniform(0.8, 1.6, 20)])
    y = np.sin(2 * x) + 0.3 * x + NOISE * rng.normal(size=40)
    inputs, targets = jnp.asarray(x[:, None], jnp.float32), jnp.asarray(y, jnp.float32)
    line = jnp.asarray(LINE[:, None], jnp.float32)

    def loss(theta: Any) -> Array:
        return -jnp.mean(dist.Normal(network(theta, inputs)[:, 0], NOISE).log_prob(targets))

    return Task(x, y, loss, _prior(1, 1), line[::6], line)


def classes(rng: np.random.Generator) -> Task:
    """Three clusters in the plane."""
    y = np.repeat(np.arange(3), 15)
    x = CENTRES[y] + 0.4 * rng.normal(size=(45, 2))
    inputs, targets = jnp.asarray(x, jnp.float32), jnp.asarray(y)
    plane = jnp.asarray(PLANE.reshape(-1, 2), jnp.float32)

    def loss(theta: Any) -> Array:
        law: Any = dist.Categorical(logits=network(theta, inputs))
        return -jnp.mean(law.log_prob(targets))

    return Task(x, y, loss, _prior(2, 3), plane[::40], plane)


def methods(task: Task) -> dict[str, tuple[Problem, AbstractFlow]]:
    """Every method of the paper is a problem and a flow; the posterior is that of all but DE."""
    weight = 1 / len(task.targets)
    posterior = Problem(task.loss, weight * KL(task.prior))
    penalised = Problem(lambda theta: task.loss(theta) - weight * task.prior.log_density(theta))
    adam, median = optax.adam(LEARNING_RATE), MedianBandwidth()
    functions = median.on(lambda theta: network(theta, task.anchors))
    return {
        "DE": (penalised, WassersteinFlow(optimiser=adam)),
        "SVGD": (posterior, SteinFlow(median, optimiser=adam)),
        "f-SVGD": (posterior, SteinFlow(functions, optimiser=adam)),
        "WGD": (posterior, WassersteinFlow(optimiser=adam, entropy=KernelDensity(median))),
        "f-WGD": (posterior, WassersteinFlow(optimiser=adam, entropy=KernelDensity(functions))),
        YARDSTICK: (posterior, KineticFlow(0.02, friction=1.0)),
    }


def reproduce(seed: int, quick: bool = False, progress: bool = False) -> Reproduction:
    """Functions of every ensemble on the line, and class probabilities in the plane."""
    rng, steps = np.random.default_rng(seed), 300 if quick else 1_000
    line, plane = regression(rng), classes(rng)
    functions = {name: values[..., 0] for name, values in _ensembles(line, steps, seed, progress).items()}
    entropies = {
        name: _entropy(values).reshape(PLANE.shape[:2])
        for name, values in _ensembles(plane, steps, seed, progress).items()
    }
    return Reproduction(
        [*_line_claims(line, functions), *_plane_claims(entropies)],
        {"members": MEMBERS, "hidden": HIDDEN, "steps": steps, "learning rate": LEARNING_RATE},
        lambda figure: _draw(figure, line, plane, functions, entropies),
        figure_size=(14.0, 5.6),
    )


def _ensembles(task: Task, steps: int, seed: int, progress: bool) -> dict[str, np.ndarray]:
    """(member, point, output) of every method, from the same start; the yardstick has three times as long."""
    start_key, key = jax.random.split(jax.random.key(seed))
    found, start = {}, task.prior.sample(start_key, MEMBERS)
    for name, (problem, flow) in tqdm(methods(task).items(), desc="ensembles", disable=not progress):
        taken = 3 * steps if name == YARDSTICK else steps
        final = _final(problem, flow, flow.init(problem, start), key, jnp.asarray(taken))
        found[name] = np.asarray(jax.vmap(lambda theta: network(theta, task.points))(final), np.float64)
    return found


@eqx.filter_jit
def _final(problem: Problem, flow: AbstractFlow, state: Any, key: Array, steps: Array) -> Any:
    measure: Any = flow.measure(run(problem, flow, state, None, key, steps))
    return measure.particles


def _entropy(logits: np.ndarray) -> np.ndarray:
    """Of the mean probabilities over members, in units of log 3."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mean = (shares / shares.sum(axis=-1, keepdims=True)).mean(axis=0)
    return -np.sum(mean * np.log(mean + 1e-12), axis=-1) / np.log(3)


def _line_claims(task: Task, functions: dict[str, np.ndarray]) -> list[Claim]:
    away = np.abs(LINE[:, None] - task.inputs).min(axis=1) > 0.3
    spread = {name: float(values.std(axis=0)[away].mean()) for name, values in functions.items()}
    inside = {name: float(values.std(axis=0)[~away].mean()) for name, values in functions.items()}
    return [
        Claim(
            "regression: repulsion of functions makes them diverse where there are no data",
            "paper",
            "a larger spread than DE's",
            {name: round(value, 2) for name, value in spread.items()},
            "mean standard deviation of members away from data",
            spread["f-WGD"] > 1.2 * spread["DE"],
            f"near data: {', '.join(f'{name} {value:.2f}' for name, value in inside.items())}.",
        ),
        Claim(
            "regression: repulsion of functions is closer to the posterior than DE is",
            "paper",
            "a smaller |log ratio| of spreads to the posterior's",
            {name: round(_off(spread, name), 2) for name in ("DE", "WGD", "f-WGD", "SVGD", "f-SVGD")},
            "away from data",
            min(_off(spread, "f-WGD"), _off(spread, "f-SVGD")) < _off(spread, "DE"),
        ),
    ]


def _off(spread: dict[str, float], name: str) -> float:
    return abs(float(np.log(spread[name] / spread[YARDSTICK])))


def _plane_claims(entropies: dict[str, np.ndarray]) -> list[Claim]:
    distance = np.linalg.norm(PLANE[:, :, None] - CENTRES, axis=-1).min(axis=-1)
    far = {name: round(float(values[distance > 3].mean()), 2) for name, values in entropies.items()}
    close = {name: round(float(values[distance < 0.5].mean()), 2) for name, values in entropies.items()}
    return [
        Claim(
            "classes: repulsion of functions is less sure away from data than DE is",
            "paper",
            "a larger entropy",
            far,
            "mean entropy in units of log 3, more than 3 from every centre",
            far["f-WGD"] > 1.1 * far["DE"],
            f"within 0.5 of a centre: {', '.join(f'{name} {value:g}' for name, value in close.items())}.",
        ),
    ]


def _draw(
    figure: "Figure",
    line: Task,
    plane: Task,
    functions: dict[str, np.ndarray],
    entropies: dict[str, np.ndarray],
) -> None:
    axes = figure.subplots(2, len(SHOWN))
    colours = dict(zip(SHOWN, ("#E69F00", "#56B4E9", "#0072B2", "#CC79A7", "#009E73"), strict=True))
    for axis, name in zip(axes[0], SHOWN, strict=True):
        values = functions[name]
        mean, spread = values.mean(axis=0), values.std(axis=0)
        axis.plot(LINE, values.T, color=colours[name], linewidth=0.5, alpha=0.5)
        axis.fill_between(LINE, mean - 2 * spread, mean + 2 * spread, color=colours[name], alpha=0.2)
        axis.plot(line.inputs, line.targets, "k.", markersize=3)
        axis.set(ylim=(-3, 3), title=name, xlabel="x")
    image: Any = None
    for axis, name in zip(axes[1], SHOWN, strict=True):
        image = axis.imshow(
            entropies[name].T, origin="lower", extent=(-6, 6, -6, 6), cmap="viridis", vmin=0, vmax=1
        )
        axis.scatter(*plane.inputs.T, c=plane.targets, cmap="autumn", s=6, edgecolors="k", linewidths=0.3)
        axis.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("members, and ± 2 deviations")
    axes[1, 0].set_ylabel("entropy of the classes")
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.5, label="in units of log 3")
