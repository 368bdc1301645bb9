"""How long a run will take, said when it is known."""

import sys
import time
from typing import Any

from tqdm.auto import tqdm

# So many seconds of steps are timed before a run says how long it takes; one that is over by then says
# nothing.
_TIMED = 0.3


class Announcement:
    """A callback of the driver that writes one line to stderr, such as "training DRLE: about 25 s". The first
    compiled call is not timed: it compiles."""

    def __init__(self, name: str, first: int, end: int):
        self.name, self.first, self.end = name, first, end
        self.began: tuple[int, float] | None = None
        self.is_said = False

    def __call__(self, step: int, record: dict[str, Any], state: Any) -> None:
        now = time.perf_counter()
        if self.began is None:
            self.began = step, now
        elif not self.is_said and now - self.began[1] >= _TIMED and step < self.end:
            seconds = (now - self.began[1]) / (step - self.began[0]) * (self.end - self.first)
            tqdm.write(f"{self.name}: about {in_words(seconds)}", file=sys.stderr)
            self.is_said = True


def in_words(seconds: float) -> str:
    """25 s, 3 min, 2 h."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.0f} h"
