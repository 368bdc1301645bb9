"""Checkpoints of a run: kill it at any moment, call it again, and it goes on as if nothing had happened."""

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from measureflow.fingerprints import differences, not_compared
from measureflow.validation import require_count

_FORMAT = 1
_MARKER = "measureflow.json"


class Checkpoint:
    """Save a run to `folder` every so many steps, and keep the latest `keep` checkpoints.

    Saving goes on while the next steps are computed. A checkpoint appears under its name when all of it is
    written, so that none is ever half. The folder belongs to one run: the same call of `solve` resumes it,
    and one with other arguments is refused.
    """

    def __init__(self, folder: str | os.PathLike, every: int = 1000, keep: int = 2):
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must be a path, got {folder!r}; for example 'runs/first'.")
        self.folder = Path(folder).absolute()
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

        self.checkpoint, self.orbax = checkpoint, orbax
        self._require_own_folder(made_of)
        options = orbax.CheckpointManagerOptions(
            max_to_keep=checkpoint.keep, create=True, cleanup_tmp_directories=True
        )
        self.manager = orbax.CheckpointManager(checkpoint.folder, options=options)
        self.last_saved = self.manager.latest_step()

    def _require_own_folder(self, made_of: Mapping[str, str]) -> None:
        """Refuse a folder that holds anything but an earlier part of this very run; then mark it."""
        folder, marker = self.checkpoint.folder, self.checkpoint.folder / _MARKER
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint folder {folder} is a file; name a folder.")
        inside = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if inside and not marker.exists():
            raise ValueError(
                f"checkpoint folder {folder} holds other things, such as {inside[0]}; name an empty one."
            )
        begun = any(name.isdigit() for name in inside)
        if begun:
            self._require_same_run(json.loads(marker.read_text(encoding="utf-8")), made_of)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "made_of": dict(made_of)}, indent=1)
        _write(marker, text)

    def _require_same_run(self, marker: dict[str, Any], made_of: Mapping[str, str]) -> None:
        if marker.get("format") != _FORMAT:
            raise ValueError(
                f"checkpoint folder {self.checkpoint.folder} has format {marker.get('format')}, this version "
                f"reads {_FORMAT}; use the version that wrote it, or another folder."
            )
        changed = differences(marker["made_of"], made_of)
        if changed:
            shown = "\n  ".join(changed[:5]) + (f"\n  and {len(changed) - 5} more" if changed[5:] else "")
            unknown = not_compared(made_of)
            note = f"\nCould not be compared: {', '.join(unknown)}." if unknown else ""
            raise ValueError(
                f"checkpoint folder {self.checkpoint.folder} holds another run; to begin anew, name another "
                f"folder. What differs:\n  {shown}{note}"
            )

    def latest(self, fresh: Any) -> Saved | None:
        """The newest checkpoint, with the structure, the devices and the sharding of a fresh state."""
        if self.last_saved is None:
            return None
        leaves, structure = jax.tree.flatten(fresh)
        template = {
            _leaf_name(i): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for i, leaf in enumerate(leaves)
        }
        arguments = self.orbax.args
        found: Any = self.manager.restore(
            self.last_saved,
            args=arguments.Composite(
                state=arguments.StandardRestore(template),
                history=arguments.StandardRestore(),
                notes=arguments.JsonRestore(),
            ),
        )
        restored = [_placed_like(leaf, found.state[_leaf_name(i)]) for i, leaf in enumerate(leaves)]
        state = jax.tree.unflatten(structure, restored)
        return Saved(state, {name: np.asarray(column) for name, column in found.history.items()}, found.notes)

    def save(self, step: int, saved: Saved) -> None:
        """Begin to write a checkpoint; what went wrong with the last one is reported, and the run goes on."""
        if step == self.last_saved:
            return
        leaves = {_leaf_name(i): leaf for i, leaf in enumerate(jax.tree.leaves(saved.state))}
        arguments = self.orbax.args
        with self._reporting():
            self.manager.save(
                step,
                args=arguments.Composite(
                    state=arguments.StandardSave(leaves),
                    history=arguments.StandardSave(saved.history),
                    notes=arguments.JsonSave(saved.notes),
                ),
                force=True,
            )
            self.last_saved = step

    def finish(self) -> None:
        """Wait until all is written."""
        with self._reporting():
            self.manager.wait_until_finished()
        with self._reporting():
            self.manager.close()

    @contextlib.contextmanager
    def _reporting(self) -> Any:
        try:
            yield
        except Exception as error:
            self.last_saved = None
            warnings.warn(
                f"a checkpoint could not be written to {self.checkpoint.folder}: {error}. The run goes on, "
                "earlier checkpoints stay; free some space, or stop with Ctrl-C to keep the state in hand.",
                stacklevel=4,
            )


def _placed_like(fresh: jax.Array, restored: jax.Array) -> jax.Array:
    """An array that was free to move stays so: one that is tied to its device would be another program."""
    return restored if fresh.committed else jnp.asarray(np.asarray(restored))


def _leaf_name(index: int) -> str:
    return f"leaf_{index:05d}"


def _write(path: Path, text: str) -> None:
    """All or nothing."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
