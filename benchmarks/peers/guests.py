"""Peers are optional, and have to do the same work."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from benchmarks.timing import AbsentError, Contender, reason

# Single precision, summed in another order.
AT_MOST_APART = 1e-3


@dataclass
class Guests:
    """The peers that came, how far each one's drift or sum was from the target's, and why others did not."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def invite(self, name: str, come: Callable[[], tuple[Callable[[], Any], float]], steps: int = 1) -> None:
        """`come()` gives what is to be timed, and its distance from the target. It may fail."""
        try:
            run, apart = come()
        except AbsentError as absent:
            self.left_out[name] = str(absent)
        except Exception as error:
            self.left_out[name] = reason(error)
        else:
            self.apart[name] = apart
            if apart <= AT_MOST_APART:
                self.contenders[name] = Contender(run, steps, optional=True)
            else:
                self.left_out[name] = f"it does other work: {apart:.1e} from the target"

    def record(self) -> dict[str, Any]:
        """What is written of them beside their times."""
        return {"apart": self.apart, "left_out": self.left_out}


def needed(name: str) -> ModuleType:
    """The module, or `AbsentError`: not installed, or not made for the libraries that are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:
        raise AbsentError(f"{name} cannot be imported ({reason(error)})") from error
