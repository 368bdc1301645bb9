"""Whether a fit has converged, by its history."""

import numpy as np

from measureflow.runs.history import History

# A fit whose loss fell by more than this share of all that it learned, between a quarter and half of its
# steps, has not converged; where held-out rows chose to stop early, by more than all of it.
_SHARE, _SHARE_STOPPED_EARLY = 0.25, 1.0
# In nats: who has learned less is taken to have learned this.
_LEAST = 0.5
# Below this many steps there are no quarters to compare.
_FEWEST = 8


def not_converged(history: History, *, stopped_early: bool = False) -> str | None:
    """What to say of a fit that has not converged; None of one that has.

    The step size is annealed by a cosine, so that at the end every run stands still. What tells is the time
    before: with L the loss, T the steps, and M(0) the loss of the mixture that the run began with,

        L(T/4) − L(T/2) > ¼ max(M(0) − L(T), ½)

    where L(T/4) and L(T/2) are means over T/8 steps.
    """
    steps, loss = history["step"], history["loss"]
    taken = int(steps[-1])
    if taken < _FEWEST:
        return f"not converged in {taken} steps, which are too few to tell anything; {_remedy(taken)}"
    early, late = (np.mean(loss[np.abs(steps - share * taken) <= taken / 16]) for share in (0.25, 0.5))
    share = float(early - late) / max(float(history["mixture_loss"][0] - loss[-1]), _LEAST)
    if share <= (_SHARE_STOPPED_EARLY if stopped_early else _SHARE):
        return None
    return (
        f"not converged in {taken} steps: from a quarter to half of them the loss fell from {early:.3g} to "
        f"{late:.3g}, which is much of all that was learned, so that intervals may be far too wide; "
        f"{_remedy(taken)}"
    )


def _remedy(taken: int) -> str:
    return f"increase steps, to {max(4 * taken, 1_000)} for example, or leave steps out."
