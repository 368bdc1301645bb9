"""The demo's picture, and the files of a reproduction's."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from measureflow.prediction.colours import COLOURS
from measureflow.spaces.measures import Gaussian
from measureflow.study.demo import GRID, Result
from measureflow.theory import quartic_loss
from measureflow.theory.laws import AtomicLaw

WIDTH = 0.15  # of a histogram's bars


def save_figure(draw: Callable[[Figure], None], size: tuple[float, float], folder: Path) -> None:
    """`figure.png` and `figure.svg` of what `draw` draws."""
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    draw(figure)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "figure.png")
    figure.savefig(folder / "figure.svg")


def demo_figure(results: Sequence[Result], path: Path) -> None:
    """Histograms of the particles over the exact targets, in the manner of the paper's Figure 2."""
    # Three beside each other can still be read where a page is 900 pixels wide.
    rows = -(-len(results) // 3)
    figure = Figure(figsize=(9.6, 2.9 * rows), layout="constrained", dpi=150)
    for place, result in enumerate(results, 1):
        _demo_panel(figure.add_subplot(rows, 3, place), result)
    figure.savefig(path)


def _demo_panel(axis: Axes, result: Result) -> None:
    colour = COLOURS[result.method]
    bins = np.arange(-3.575, 2.6, WIDTH).tolist()
    if isinstance(result.measure, Gaussian):
        density = np.exp([float(result.measure.log_density(jnp.full(1, theta))) for theta in GRID])
        axis.fill_between(GRID, density, color=colour, alpha=0.45, label="$Q$, the best Gaussian found")
    else:
        axis.hist(result.particles, bins, density=True, color=colour, alpha=0.45, label="particles")
    if isinstance(result.law, AtomicLaw):
        # An atom as tall as the histogram bar that would hold its mass.
        heights = np.diff(result.law.cumulative, prepend=0.0) / WIDTH
        label = "exact limit (Theorem 1)" if result.method == "DE" else "exact $Q^*$"
        axis.vlines(result.law.atoms, 0, heights, "k", linestyles="--", linewidth=1.3, label=label)
    if result.density is not None:
        axis.plot(GRID, result.density, "k--", linewidth=1.3, label="exact $q^*$")
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])
    low, high = axis.get_ylim()
    loss = np.asarray(jax.vmap(quartic_loss)(jnp.asarray(GRID)))
    axis.plot(GRID, low + (loss + 5) / 13 * (high - low), color="0.75", linewidth=1, zorder=0, label="loss ℓ")
    axis.set(xlim=(-3.5, 2.5), ylim=(low, high), yticks=[], xlabel="θ")
    axis.set_title(result.method, color=colour, fontweight="bold")
    axis.legend(loc="upper right", fontsize=7, frameon=True, framealpha=0.8, edgecolor="none")
    axis.spines[["top", "right", "left"]].set_visible(False)
