"""Writes docs/benchmarks.md and its pictures from a folder of `python -m benchmarks`.

python -m benchmarks.page FOLDER [NAME]

NAME is that of the page and of its folder of pictures: `benchmarks`, or `benchmarks-gpu`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.pairs import UNITS

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
# Benchmarks

What `python -m benchmarks` (`make bench`) measured on the machine below. A time by itself says little, so
everything is a ratio within one run: all contenders of a comparison take turns, round after round, and the
median of their ratio over the rounds is shown, with its quartiles in brackets. Compiling is not counted,
except in whole fits.
"""

IMPORTS = """\
## Import

What `import measureflow` takes in a fresh process, beside `import jax`; in brackets, multiples of the first
column. Names are imported when they are first asked for: the last column has those that `solve` needs.
"""

DEFAULTS = """\
## Default fits

What a person waits for: a process that imports, compiles, chooses and trains. The second process finds
compiled programs in the cache folder.
"""

OVERHEAD = """\
## A step against its bare arithmetic

The baselines are plain JAX, one compiled loop that imports nothing from measureflow: the vmapped gradient
step, and the same with normal draws of the particles' shape from `jax.random.normal`. The four ensembles
run by `mf.run` inside one `jit`; *by solve* is `mf.solve` with its history. In brackets, multiples of the
first column. For the paper's toys the baseline is the sum of the kernel's gradient over all pairs, and
the draws.

![Bars: a step of each contender as a multiple of the bare step.](assets/{name}/overhead.png)
"""

RESIDUAL = """\
## Residual networks of ten million parameters

The particles are float32, the networks compute in bfloat16. The baseline is the plain training of the same
ensemble. *Exact* interactions read all particles twice and write all forces; *projected* ones, in {count}
numbers of `mf.RandomProjection`, read them once. Squared distances of these particles are off by {error:.1%}
in the projections (root mean square over pairs; √(2/{count}) is {said:.1%}). Memory is all that the compiled
program holds, over the number of particles: particles before and after a step, gradients, and what the
network remembers for them.
"""

PAIRS = """\
## All pairs

The exact sum of the gradient of κ over all pairs in the plane, against plain JAX in tiles of rows. On a GPU
the limit is that of its exponentials, of which a pair needs one: multiprocessors · {units} · clock.
"""

PEERS = """\
## Other libraries

Each is called as its own documentation says, on the same target with the same particles, and only if it
is installed. DLE is stochastic gradient Langevin dynamics, so it is what the SGLD of BlackJAX and
posteriors does; DRLE does more. NumPyro's SVGD moves its particles by their gradients and their kernel,
as DRLE does; its SteinVI has a Gaussian in each particle's place, here with a single draw.
{apart}
![Bars: how many times faster measureflow is than each peer, logarithmic.](assets/{name}/peers.png)
"""

APART = """\
Before anything is timed, each one's drift, or sum, is compared with that of the target; the largest
difference was {apart:.0e} of the largest entry.
"""

FITS = """\
A whole fit of scikit-learn's diabetes data: bde with the settings of its documentation's regression
example; ours with its defaults, which also choose the prior's weight on held-out rows; ours with bde's
statement, the Bayes posterior, in as many steps as it trains, warms up and samples; and the same with as
many gradients of all rows, of which bde's sampler needs two a step, where ours makes do with one of a
batch. The networks and their number are equal. Each is a fresh process that fits twice: the first fit
compiles, the second reuses what it can.
"""

GROWTH = """\
## Growth

A DRLE step with exact interactions, along one axis at a time. The exponent is the slope of logarithms
over the larger half of the sizes. Memory is what the compiled program needs beside its arguments and
results. Devices are simulated on the CPU: what each holds and sends is read from the compiled program. The
least that each must send for an exact sum is its own particles, once for every other device.

![Log-log plots of time and memory against size, with fitted slopes.](assets/{name}/growth.png)
"""

TARGETS = """\
## Targets

What was promised, and whether it holds in this run.
"""


def page(results: dict[str, Any], name: str) -> str:
    """The whole page; only what was run is shown."""
    parts = [INTRODUCTION, tables.machine_line(results) + "\n"]
    if results.get("imports"):
        parts += [IMPORTS, tables.imports(results["imports"]) + "\n"]
    if results.get("fits"):
        parts += [DEFAULTS, tables.fits(results["fits"]) + "\n"]
    if results.get("overhead"):
        parts += [OVERHEAD.format(name=name), tables.overhead(results["overhead"]) + "\n"]
    if results.get("residual"):
        case = results["residual"][0]
        told = {"count": case["count"], "error": case["error"], "said": (2 / case["count"]) ** 0.5}
        parts += [RESIDUAL.format(**told), tables.residual(results["residual"]) + "\n"]
    if results.get("pairs"):
        parts += [PAIRS.format(units=UNITS), tables.pairs(results["pairs"]) + "\n"]
    if results.get("peers"):
        cases = results["peers"]
        apart = tables.disagreement(cases)
        parts.append(PEERS.format(name=name, apart="" if apart is None else "\n" + APART.format(apart=apart)))
        parts.append(tables.peers(cases) + "\n")
        if tables.scores(cases):
            parts += [FITS, tables.scores(cases) + "\n"]
        if tables.left_out(cases):
            parts.append(tables.left_out(cases) + "\n")
    if results.get("growth"):
        parts += [GROWTH.format(name=name), tables.growth(results["growth"]) + "\n"]
    if tables.targets(results):
        parts += [TARGETS, tables.targets(results) + "\n"]
    return "\n".join(parts)


def write(folder: Path, docs: Path, name: str = "benchmarks") -> None:
    """The page, and the pictures that it shows."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    pictures = docs / "assets" / name
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in folder.glob("*.png"):
        shutil.copy(picture, pictures / picture.name)
    (docs / f"{name}.md").write_text(page(results, name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), DOCS, *sys.argv[2:])
