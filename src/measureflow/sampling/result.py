"""What `sample` returns."""

import dataclasses
import importlib
import importlib.util
from typing import Any

import jax
import numpy as np

from measureflow.runs.history import History
from measureflow.spaces.empirical import Empirical
from measureflow.statement.certificate import Certificate

#: Above this nested R̂, particles have not forgotten their start.
R_HAT = 1.01


class SamplingWarning(UserWarning):
    """Draws that are not to be trusted, and what to do."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """What `sample` returns.

    `draws` is the pytree of θ with leading axes (particle, draw), `measure` all of them as one `Empirical`.
    `r_hat` and `effective_draws` are shaped like θ. `gradients` counts those of each particle, one after the
    other; `levels` those of tempering, if there were any; `replaced` the hopeless particles; `stiff` the
    share of trajectories that were rejected however small their steps. `exact` says whether steps were
    accepted or rejected, so that no step size bends the law. `problems` says why the numbers are not to be
    trusted, if anything does; the truth value is that there is nothing. `interrupted` is the name of the
    signal that ended it before its time, if one did.
    """

    draws: Any
    measure: Empirical
    certificate: Certificate
    r_hat: Any
    effective_draws: Any
    gradients: int
    history: History
    acceptance: float
    stiff: float
    replaced: int
    levels: int
    exact: bool
    problems: tuple[str, ...] = ()
    interrupted: str | None = None

    def __bool__(self) -> bool:
        return bool(self.certificate) and not self.problems

    def __repr__(self) -> str:
        n, m = jax.tree.leaves(self.draws)[0].shape[:2]
        trusted = "trusted" if self else "NOT to be trusted"
        trusted += "" if self.exact else ", unadjusted"
        return (
            f"Sample({n} particles × {m} draws, {trusted}: R̂ ≤ {_largest(self.r_hat):.3g}, "
            f"{self.gradients} gradients, certificate {self.certificate.statistic:.1f} of "
            f"{self.certificate.limit:.1f} standard errors)"
        )

    def to_arviz(self, draws: Any = None, **keywords: Any) -> Any:
        """The draws for ArviZ; `keywords` go to `arviz.from_dict`.

        A thousand chains of ten draws are not what ArviZ thinks of as chains. So up to eight groups of
        particles make a chain each, the draws of one particle after those of another: draws within a particle
        hang together, as ArviZ expects of neighbours, and chains are independent.

        Parameters
        ----------
        draws
            What to show in the place of θ: functions of the draws, with the same leading axes, such as
            `model.constrained(result.draws)` of a NumPyro model.
        keywords
            What else ArviZ is to know, such as `coords` and `dims`.
        """
        if importlib.util.find_spec("arviz") is None:
            raise ImportError("to_arviz needs the package arviz; pip install arviz.")
        arviz = importlib.import_module("arviz")
        n, m = jax.tree.leaves(self.draws)[0].shape[:2]
        chains = max(count for count in range(1, 9) if n % count == 0)
        laid_out = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.draws if draws is None else draws):
            if leaf.shape[:2] != (n, m):
                raise ValueError(
                    f"draws must have the leading axes (particle, draw) = {(n, m)}, got {leaf.shape} for "
                    f"{_name(path)!r}; pass a function of all of result.draws."
                )
            laid_out[_name(path)] = np.asarray(leaf).reshape(chains, -1, *leaf.shape[2:])
        return arviz.from_dict(posterior=laid_out, **keywords)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "theta"


def _largest(tree: Any) -> float:
    return max(float(np.max(leaf)) for leaf in jax.tree.leaves(tree))
