"""Whose line a warning shows."""

import sys
import typing

# What stands between our functions in a traceback.
_OURS = {__name__.partition(".")[0], "equinox", "jaxtyping", "beartype"}


# Wrapped by a checker of types, it would count frames of the wrapper.
@typing.no_type_check
def at_the_users_line() -> int:
    """The `stacklevel` of `warnings.warn` for the first line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
