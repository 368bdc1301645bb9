"""Whether a fit has converged, by its history."""

import numpy as np

from measureflow.runs.history import History

# A fit whose loss fell by more than this share of all it learned, between a quarter and half of its steps,
# has not converged. In nats, it has learned as much as this at least.
_SHARE, _LEAST = 0.2, 0.5


def still_falling(history: History) -> str | None:
    """What to say of a fit that has not converged; None of one that has.

    The step size is annealed by a cosine, so that at the end every run stands still. What tells is the time
    before: with loss L, T steps, and M(0) the loss of the mixture that the run began with,

        L(T/4) − L(T/2) > 0.2 max(M(0) − L(T), ½)
    """
    steps, loss = history["step"], history["loss"]
    early = loss[np.searchsorted(steps, steps[-1] / 4, side="right") - 1]
    late = loss[np.searchsorted(steps, steps[-1] / 2)]
    learned = max(float(history["mixture_loss"][0] - loss[-1]), _LEAST)
    share = float(early - late) / learned
    if share <= _SHARE:
        return None
    return (
        f"the ensemble has not converged in {steps[-1]} steps: from a quarter of them to half of them its loss "
        f"still fell by {early - late:.2g}, {share:.0%} of all that it learned, and its intervals may be far too wide; "
        f"increase steps, to {4 * int(steps[-1])} for example, or leave it out."
    )
