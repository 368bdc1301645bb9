"""The setting that needs no tuning: how an ensemble is trained, and what goes by the size of its table."""

import dataclasses
import math

from jax.sharding import Mesh

from measureflow.tables.choosing import FEWEST_TO_CHOOSE
from measureflow.tables.methods import METHODS, Candidate, Method

# No run is shorter, unless it is asked to be.
FEWEST_STEPS = 500
# Of networks that are not simple: the share of all steps that a trial takes, and an ensemble where targets
# are mostly noise; and the number of all steps, where they have little noise.
TRIAL_SHARE, LONGEST = 0.25, 2.0
# A trial takes no more steps than these.
_MOST_TRIAL_STEPS = 20_000
# From so many rows on, steps of networks that are not simple see more of them: with a hundred it is the noise
# of batches that keeps them from learning all that such a table can tell.
_LARGE = 20_000


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How ensembles are trained. `prior_weight=None` is chosen on held-out rows. Particles are cut over the
    axis "particles" of a `mesh`."""

    method: Method = METHODS["DRLE"]
    particles: int = 20
    mmd: float = 0.5
    prior_weight: float | None = None
    step_size: float = 0.01
    momentum: float = 0.9
    batch_size: int = 100
    mesh: Mesh | None = None

    def candidates(self, rows: int) -> tuple[Candidate, ...]:
        """What there is to choose from for a table of so many rows."""
        if self.prior_weight is not None:
            return (Candidate(self.prior_weight),)
        return self.method.candidates if rows >= FEWEST_TO_CHOOSE else (Candidate(1.0),)


def steps_for(rows: int, parameters: int, *, classes: bool, simple: bool = True) -> int:
    """40 steps a row, from 4,000 to 10,000, then 20 a row up to 60,000; where targets are classes a fifth,
    then a tenth of that. Two fifths for networks that are not `simple`, with bins or several layers, which
    learn faster and learn rows by heart, and half of these for 20,000 rows and more, where steps see more of
    them; fewer for those of more than 20,000 parameters, whose steps cost more."""
    fewest, few, many = (800, 2_000, 2 * rows) if classes else (4_000, 10_000, 20 * rows)
    steps = max(fewest, min(40 * rows, few), min(many, 60_000))
    share = 1.0 if simple or classes else 0.4 if rows < _LARGE else 0.2
    return max(int(share * steps * min(1.0, 20_000 / parameters)), FEWEST_STEPS)


def trial_steps_for(steps: int, *, simple: bool) -> int:
    """Enough to tell trials apart: of an ensemble that will take so many steps, all, or a quarter where it is
    not `simple`."""
    return min(steps if simple else math.ceil(TRIAL_SHARE * steps), _MOST_TRIAL_STEPS)


def batch_size_for(rows: int, *, classes: bool = False, simple: bool = True) -> int:
    """50 rows, or 100 of 2,000 and more; 500 of 20,000 and more for networks that are not `simple`."""
    if rows >= _LARGE and not (classes or simple):
        return 500
    return 50 if rows < 2_000 else 100
