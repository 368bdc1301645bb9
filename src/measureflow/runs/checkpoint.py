"""Checkpoints of a run: kill it at any moment, call it again, and it goes on as if nothing had happened."""

import contextlib
import json
import logging
import os
import shutil
import traceback
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from measureflow.core.devices import together
from measureflow.core.validation import require_count
from measureflow.runs.fingerprints import differences, not_compared

_FORMAT = 1
_MARKER = "measureflow.json"
_UNFINISHED_MARKER = "measureflow.tmp"
# Where checkpoints go to be deleted, so that none that is half deleted stands under its name.
_DELETED = "deleted"


class Checkpoint:
    """Save a run to `folder` every so many steps, and keep the latest `keep` checkpoints.

    Saving goes on while the next steps are computed. A checkpoint appears under its name when all of it is
    written, so that none is ever half. The folder belongs to one run: the same call of `solve` resumes it,
    and one with other arguments is refused.
    """

    def __init__(self, folder: str | os.PathLike, every: int = 1000, keep: int = 2):
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must be a path, got {folder!r}; for example 'runs/first'.")
        self.folder = Path(folder).expanduser().absolute()
        self.every = require_count("every", every, 1, "it counts the steps from one checkpoint to the next.")
        self.keep = require_count("keep", keep, 1, "2 leaves one to fall back on.")

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, every={self.every}, keep={self.keep})"


class Saved(NamedTuple):
    """What a checkpoint holds: the leaves of the state, the rows of history, and all else as JSON."""

    state: Any
    history: dict[str, np.ndarray]
    notes: dict[str, Any]


class Store:
    """The checkpoints of one run, on disk."""

    def __init__(self, checkpoint: Checkpoint, made_of: Mapping[str, str]):
        import orbax.checkpoint as orbax

        self.checkpoint, self.orbax, self.made_of = checkpoint, orbax, dict(made_of)
        self._require_own_folder()
        logging.getLogger("absl").addFilter(_not_of_orbax)
        self.manager = self._opened()
        self.begun: int | None = None

    def _require_own_folder(self) -> None:
        """Refuse a folder that holds anything but an earlier part of this very run; mark a new one."""
        folder = self.checkpoint.folder
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint folder {folder} is a file; name a folder.")
        inside = {path.name for path in folder.iterdir()} if folder.exists() else set()
        others = sorted(inside - {_MARKER, _UNFINISHED_MARKER})
        if others and _MARKER not in inside:
            raise ValueError(
                f"checkpoint folder {folder} holds other things, such as {others[0]}; name an empty one."
            )
        if any(name.isdigit() for name in others):
            self._require_same_run()
            return
        # Of many processes all look before the first one writes.
        together("checked")
        try:
            self._mark()
        except OSError as error:
            raise ValueError(
                f"checkpoint folder {folder} cannot be written to: {error}; name another one."
            ) from error
        together("marked")

    def _mark(self) -> None:
        """Say what the run is made of: all of it or nothing."""
        if jax.process_index() > 0:
            return
        folder = self.checkpoint.folder
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "made_of": self.made_of}, indent=1)
        with (folder / _UNFINISHED_MARKER).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        (folder / _UNFINISHED_MARKER).replace(folder / _MARKER)

    def _require_same_run(self) -> None:
        folder = self.checkpoint.folder
        try:
            marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
            written, made_of = marker["format"], dict(marker["made_of"])
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ValueError(
                f"checkpoint folder {folder} has an unreadable {_MARKER}, and cannot say which run it holds "
                f"({error}); name another folder."
            ) from error
        if written != _FORMAT:
            raise ValueError(
                f"checkpoint folder {folder} has format {written}, this version reads {_FORMAT}; use the "
                "version that wrote it, or another folder."
            )
        changed = differences(made_of, self.made_of)
        if changed:
            shown = "\n  ".join(changed[:5]) + (f"\n  and {len(changed) - 5} more" if changed[5:] else "")
            unknown = not_compared(self.made_of)
            note = f"\nCould not be compared: {', '.join(unknown)}." if unknown else ""
            raise ValueError(
                f"checkpoint folder {folder} holds another run; to begin anew, name another folder. What "
                f"differs:\n  {shown}{note}"
            )

    def _opened(self) -> Any:
        """Orbax's manager. It removes what an earlier one had begun to write; we, what it had to delete."""
        self._delete()
        options = self.orbax.CheckpointManagerOptions(
            max_to_keep=self.checkpoint.keep,
            create=True,
            cleanup_tmp_directories=True,
            todelete_subdir=_DELETED,
        )
        return self.orbax.CheckpointManager(self.checkpoint.folder, options=options)

    def _delete(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.checkpoint.folder / _DELETED, ignore_errors=True)

    def latest(self, fresh: Any) -> Saved | None:
        """The newest checkpoint that can be read, with the structure and the devices of a fresh state."""
        unreadable: dict[int, Exception] = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                saved = self._read(step, fresh)
            except Exception as error:
                unreadable[step] = error
            else:
                self._set_aside(unreadable, step)
                self.begun = step
                return saved
        if unreadable:
            step, error = next(iter(unreadable.items()))
            raise ValueError(
                f"checkpoint folder {self.checkpoint.folder} holds checkpoints of steps {list(unreadable)}, "
                f"but none can be read; to begin anew, name another folder. Step {step}: {_brief(error)}"
            ) from error
        return None

    def _read(self, step: int, fresh: Any) -> Saved:
        leaves, structure = jax.tree.flatten(fresh)
        template = {
            _leaf_name(i): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for i, leaf in enumerate(map(_numbers, leaves))
        }
        arguments = self.orbax.args
        found: Any = self.manager.restore(
            step,
            args=arguments.Composite(
                state=arguments.StandardRestore(template),
                history=arguments.StandardRestore(),
                notes=arguments.JsonRestore(),
            ),
        )
        history = {name: np.asarray(column) for name, column in found.history.items()}
        checksums = _checksum(found.state, history), found.notes["checksum"]
        if None not in checksums and checksums[0] != checksums[1]:
            raise ValueError("its numbers are not those that were written.")
        restored = [_like(leaf, found.state[_leaf_name(i)]) for i, leaf in enumerate(leaves)]
        return Saved(jax.tree.unflatten(structure, restored), history, found.notes)

    def _set_aside(self, unreadable: Mapping[int, Exception], step: int) -> None:
        """Out of the way of checkpoints to come, but for a person to look at."""
        folder = self.checkpoint.folder
        for newer, error in unreadable.items() if jax.process_index() == 0 else ():
            aside = folder / f"{newer}.unreadable"
            shutil.rmtree(aside, ignore_errors=True)
            (folder / str(newer)).replace(aside)
            warnings.warn(
                f"the checkpoint of step {newer} in {folder} cannot be read and is now {aside.name}; the run "
                f"goes on from step {step}. The reason: {_brief(error)}",
                stacklevel=6,
            )
        if unreadable:
            together("set aside")
            self.manager.reload()

    def is_due(self, step: int) -> bool:
        """Whether there is to be a checkpoint at this step."""
        return step % self.checkpoint.every == 0

    def save(self, step: int, saved: Saved) -> None:
        """Begin to write a checkpoint. What went wrong with it is reported later, and the run goes on."""
        if step == self.begun:
            return
        self._wait()
        leaves = {_leaf_name(i): _numbers(leaf) for i, leaf in enumerate(jax.tree.leaves(saved.state))}
        notes = saved.notes | {"checksum": _checksum(leaves, saved.history)}
        arguments = self.orbax.args
        with self._reporting():
            self.manager.save(
                step,
                args=arguments.Composite(
                    state=arguments.StandardSave(leaves),
                    history=arguments.StandardSave(saved.history),
                    notes=arguments.JsonSave(notes),
                ),
                force=True,
            )
            self.begun = step

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, when all is written."""
        self._wait()
        return step in self.manager.all_steps()

    def close(self) -> None:
        """Wait until all is written, and let go of the folder."""
        self._wait()
        with self._reporting():
            self.manager.close()
        logging.getLogger("absl").removeFilter(_not_of_orbax)

    def _wait(self) -> None:
        with self._reporting():
            self.manager.wait_until_finished()
        self._delete()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.begun = None
            folder = self.checkpoint.folder
            # A manager that has failed forgets what to delete, and what it has written so far takes space.
            with contextlib.suppress(Exception):
                self.manager.close()
            with contextlib.suppress(Exception):
                self.manager = self._opened()
                if not (folder / _MARKER).exists():
                    self._mark()
            warnings.warn(
                f"a checkpoint could not be written to {folder}: {_brief(error)}. The run goes on, earlier "
                "checkpoints stay; free some space, or stop with Ctrl-C to keep the state in hand.",
                stacklevel=8,
            )


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a line of log is to be shown: what fails is told by our own warning, not by ten tracebacks."""
    trace = record.exc_info[2] if record.exc_info else None
    return not any("orbax" in frame.filename for frame in traceback.extract_tb(trace))


def _brief(error: Exception) -> str:
    """What went wrong, without the specification of all that might have."""
    return str(error).split(" [tensorstore_spec")[0][:400]


def _numbers(leaf: jax.Array) -> jax.Array:
    """Random keys as the numbers that they are made of."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _like(fresh: jax.Array, restored: jax.Array) -> jax.Array:
    """An array that was free to move stays so: one that is tied to its device would be another program."""
    restored = restored if fresh.committed else jnp.asarray(np.asarray(restored))
    if jnp.issubdtype(fresh.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(fresh))
    return restored


def _checksum(leaves: Mapping[str, Any], history: Mapping[str, Any]) -> int | None:
    """Of all numbers; Orbax looks at whether they are there, not at what they are. None where they are spread
    over processes, of which none has them all."""
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves.values()):
        return None
    found = 0
    for part in (leaves, history):
        for name in sorted(part):
            found = zlib.crc32(np.ascontiguousarray(part[name]).tobytes(), found)
    return found


def _leaf_name(index: int) -> str:
    return f"leaf_{index:05d}"
