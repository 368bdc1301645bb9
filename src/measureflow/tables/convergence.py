"""Whether a fit has converged, by its history."""

import numpy as np

from measureflow.runs.history import History

# A fit whose loss fell by more than this share of all that it learned, between a quarter and half of its
# steps, has not converged; where held-out rows chose to stop early, by more than all of it.
_SHARE, _SHARE_STOPPED_EARLY = 0.2, 1.0
# In nats: who has learned less is taken to have learned this.
_LEAST = 0.5


def not_converged(history: History, *, stopped_early: bool = False) -> str | None:
    """What to say of a fit that has not converged; None of one that has.

    The step size is annealed by a cosine, so that at the end every run stands still. What tells is the time
    before: with L the loss, T the steps, and M(0) the loss of the mixture that the run began with,

        L(T/4) − L(T/2) > 0.2 max(M(0) − L(T), ½)
    """
    steps, loss = history["step"], history["loss"]
    early = loss[np.searchsorted(steps, steps[-1] / 4, side="right") - 1]
    late = loss[np.searchsorted(steps, steps[-1] / 2)]
    share = float(early - late) / max(float(history["mixture_loss"][0] - loss[-1]), _LEAST)
    if share <= (_SHARE_STOPPED_EARLY if stopped_early else _SHARE):
        return None
    return (
        f"not converged in {int(steps[-1])} steps: from a quarter to half of them the loss fell from "
        f"{early:.3g} to {late:.3g}, which is much of all that was learned, so that intervals may be far too "
        f"wide; increase steps, to {4 * int(steps[-1])} for example, or leave steps out."
    )
