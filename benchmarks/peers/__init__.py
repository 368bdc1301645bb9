"""measureflow against other libraries, each called as its own documentation says.

A peer that cannot be imported is left out, with a word. Before it is timed, each one's drift (or sum) is
compared with that of the target: all do the same work.
"""

from benchmarks.peers import kernel_sum, langevin, stein, svgd, tabular_fit
from benchmarks.timing import Job


def jobs(*, quick: bool = False) -> list[Job]:
    """The parts of this benchmark; `quick` only shows that they run."""
    return [
        *langevin.jobs(quick=quick),
        *stein.jobs(quick=quick),
        *svgd.jobs(quick=quick),
        *tabular_fit.jobs(quick=quick),
        *kernel_sum.jobs(quick=quick),
    ]
