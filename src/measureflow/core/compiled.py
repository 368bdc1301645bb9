"""Compiled programs, kept for the next process: compiling takes a third of a first fit, or more.

JAX has the cache; it is switched on here, in the user's cache folder, for estimators and the command line.
"""

import contextlib
import functools
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

#: "off" switches the cache off; a path is the folder to keep programs in.
VARIABLE = "MEASUREFLOW_CACHE"
# Programs that take longer to compile are kept, and so many bytes of them.
_SECONDS, _MOST_BYTES = 0.3, 2 * 2**30


@functools.cache
def keep_programs() -> Path | None:
    """Let JAX keep what this process compiles from now on, and find what others have kept; the folder, or
    None where the cache is off, where JAX has one already, or where the folder cannot be written to.

    Programs are found by all that they are made of, JAX's version included. Each kind of processor has a
    folder of its own: one home may be shared by many. A program that cannot be written, as on a full disk, or
    read, is compiled; JAX says so in a warning.
    """
    asked = os.environ.get(VARIABLE, "")
    settings: Any = jax.config
    taken = settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache
    if asked.lower() in ("off", "0", "no", "false") or taken:
        return None
    folder = (Path(asked) if asked else _users_cache() / "measureflow") / _kind_of_processor()
    try:
        # JAX runs what it finds there: nobody else may write to it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return None
        _drop_oldest(folder, _MOST_BYTES)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    return folder


def _users_cache() -> Path:
    """Where programs of this system keep what they can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _kind_of_processor() -> str:
    """A program for one may use instructions that another has not."""
    described = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next((line for line in lines if line.startswith(("flags", "Features"))), described)
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def _drop_oldest(folder: Path, most: int) -> None:
    """Until no more than so many bytes are left. Another process may do the same."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    bytes_left = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if bytes_left <= most:
            return
        path.unlink(missing_ok=True)
        bytes_left -= size
