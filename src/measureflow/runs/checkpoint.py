"""Checkpoints of a run: kill it at any moment, call it again, and it goes on as if nothing had happened.

A checkpoint is a file as `save` writes it; one of each process, where there are many. They write what lies
with them, and need not wait for each other: a checkpoint is there when the files of all are.
"""

import functools
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from measureflow.core.devices import agreed, together
from measureflow.core.pytrees import is_key, numbers_of
from measureflow.core.validation import require_count
from measureflow.runs.background import Background, result
from measureflow.runs.fingerprints import differences, not_compared
from measureflow.saving.container import replacing, strict_json
from measureflow.saving.documents import load, save

_FORMAT = 2
_MARKER = "measureflow.json"
_FILE = re.compile(r"(\d+)-(\d+)-of-(\d+)\.safetensors")
_UNFINISHED = re.compile(rf"\.({_FILE.pattern}|{re.escape(_MARKER)})\.[0-9a-f]+\.tmp")


#: Where each part of an array begins, and its numbers.
_Parts: TypeAlias = list[tuple[tuple[int, ...], Any]]


class Checkpoint:
    """Save a run to `folder` every so many steps, and resume it from there.

    Saving goes on while the next steps are computed. A checkpoint gets its name when all of it is written, so
    that none is ever half-written. The folder belongs to one run: the same call of `solve`, or of `sample`,
    resumes it, and one with other arguments is refused.

    Parameters
    ----------
    folder
        Where: a folder of this run alone, which is made if it is not there.
    every
        How many steps lie between two checkpoints; of `sample`, gradients, and its phases end with one.
    keep
        How many checkpoints are kept, the latest ones.
    on_code_change
        "raise", or "warn": what to do where all agrees but the code of functions, as after a change of
        Python's version or of a library's.
    """

    def __init__(
        self, folder: str | os.PathLike, every: int = 1000, keep: int = 2, *, on_code_change: str = "raise"
    ):
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must be a path, got {folder!r}; for example 'runs/first'.")
        if on_code_change not in ("raise", "warn"):
            raise ValueError(f"on_code_change must be 'raise' or 'warn', got {on_code_change!r}.")
        self.folder = Path(folder).expanduser().absolute()
        self.every = require_count("every", every, 1, "it counts the steps from one checkpoint to the next.")
        self.keep = require_count("keep", keep, 1, "2 leaves one to fall back on.")
        self.on_code_change = on_code_change

    def __repr__(self) -> str:
        changed = "" if self.on_code_change == "raise" else f", on_code_change={self.on_code_change!r}"
        return f"Checkpoint({str(self.folder)!r}, every={self.every}, keep={self.keep}{changed})"


class Saved(NamedTuple):
    """What a checkpoint holds: the state, the rows of history, and all else as JSON."""

    state: Any
    history: dict[str, np.ndarray]
    notes: dict[str, Any]


class Store:
    """The checkpoints of one run, on disk."""

    def __init__(self, checkpoint: Checkpoint, made_of: Mapping[str, str]):
        self.checkpoint, self.made_of = checkpoint, dict(made_of)
        self._require_own_folder()
        self.background = Background()
        self.writing: Future | None = None
        self.begun: int | None = None

    def _require_own_folder(self) -> None:
        """Refuse a folder that holds anything but an earlier part of this very run; mark a new one."""
        folder = self.checkpoint.folder
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"checkpoint folder {folder} is a file; name a folder.")
        inside = {path.name for path in folder.iterdir()} if folder.exists() else set()
        others = sorted(name for name in inside - {_MARKER} if not _UNFINISHED.fullmatch(name))
        if others and _MARKER not in inside:
            raise ValueError(
                f"checkpoint folder {folder} is not empty and holds no run, but files such as {others[0]}; "
                "name an empty one."
            )
        # Those of digits only are of an earlier format.
        is_new = not any(_FILE.fullmatch(name) or name.isdigit() for name in others)
        if not is_new:
            self._require_same_run()
        # Of many processes all look before the first one writes.
        together("checked")
        try:
            if is_new:
                self._mark()
            for path in list(folder.iterdir()) if jax.process_index() == 0 else ():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            raise ValueError(
                f"checkpoint folder {folder} cannot be written to: {error}; name another one."
            ) from error
        together("marked")

    def _mark(self) -> None:
        """Say what the run is made of."""
        if jax.process_index() == 0:
            self.checkpoint.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"format": _FORMAT, "made_of": self.made_of}, indent=1)
            with replacing(self.checkpoint.folder / _MARKER, force=True) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def _require_same_run(self) -> None:
        folder = self.checkpoint.folder
        try:
            marker = strict_json((folder / _MARKER).read_text(encoding="utf-8"))
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
        changed, recoded = differences(made_of, self.made_of)
        unknown = ", ".join(not_compared(self.made_of)[:20])
        unknown = f"Could not be compared: {unknown}." if unknown else ""
        if changed:
            raise ValueError(
                f"checkpoint folder {folder} holds another run; to start over, name another folder. What "
                f"differs:{_listed(changed + recoded)}\n{unknown}"
            )
        if recoded:
            found = f"differs from that of the run in {folder}:{_listed(recoded)}\n"
            if self.checkpoint.on_code_change == "raise":
                raise ValueError(
                    f"the code {found}All else is unchanged. If it means the same, as under another version "
                    "of Python or of a library, go on with mf.Checkpoint(..., on_code_change='warn'); to "
                    "start over, name another folder."
                )
            warnings.warn(f"the run goes on, though the code {found}", stacklevel=5)
        if unknown:
            warnings.warn(f"the run in {folder} is resumed as the same one. {unknown}", stacklevel=5)

    def _complete(self) -> dict[int, list[Path]]:
        """The files of every checkpoint of which all are there, by step."""
        groups: dict[tuple[int, int], list[Path]] = {}
        for path in sorted(self.checkpoint.folder.iterdir()):
            if found := _FILE.fullmatch(path.name):
                groups.setdefault((int(found[1]), int(found[3])), []).append(path)
        return {step: paths for (step, count), paths in groups.items() if len(paths) == count}

    def _own(self, step: int) -> Path:
        place = f"{jax.process_index() + 1}-of-{jax.process_count()}"
        return self.checkpoint.folder / f"{step}-{place}.safetensors"

    def latest(self, fresh: Callable[[dict[str, Any]], Any]) -> Saved | None:
        """The newest checkpoint that can be read, with the structure and the devices of a fresh state, which
        may depend on what was noted with it."""
        left, unreadable = self._complete(), {}
        while (step := agreed(max(left, default=-1))) >= 0:
            paths, saved, error = left.pop(step, []), None, ValueError("another process cannot read it")
            try:
                saved = self._read(paths, fresh)
            except Exception as caught:
                error = caught
            # One that any process cannot read is no use to the others.
            if not agreed(saved is None):
                self._set_aside(unreadable, step)
                self.begun = step
                return saved
            unreadable[step] = paths, error
        if unreadable:
            step, (_, error) = next(iter(unreadable.items()))
            raise ValueError(
                f"checkpoint folder {self.checkpoint.folder} holds checkpoints of steps {list(unreadable)}, "
                f"but none can be read; to start over, name another folder. Step {step}: {str(error)[:400]}"
            ) from error
        return None

    def _read(self, paths: list[Path], fresh: Callable[[dict[str, Any]], Any]) -> Saved:
        files = [Saved(**load(path)) for path in paths]
        leaves, structure = jax.tree.flatten(fresh(files[0].notes))
        parts = zip(*(file.state for file in files), strict=True)
        restored = [_restored(leaf, [*itertools.chain(*of)]) for leaf, of in zip(leaves, parts, strict=True)]
        return files[0]._replace(state=jax.tree.unflatten(structure, restored))

    def _set_aside(self, unreadable: Mapping[int, tuple[list[Path], Exception]], step: int) -> None:
        """Out of the way of checkpoints to come, but for a person to look at."""
        for newer, (paths, error) in unreadable.items() if jax.process_index() == 0 else ():
            for path in paths:
                path.replace(path.with_name(f"{path.name}.unreadable"))
            warnings.warn(
                f"the checkpoint of step {newer} in {self.checkpoint.folder} cannot be read and is now "
                f"*.unreadable; the run goes on from step {step}. The reason: {str(error)[:400]}",
                stacklevel=6,
            )
        together("set aside")

    def is_due(self, step: int) -> bool:
        """Whether there is to be a checkpoint at this step."""
        return step % self.checkpoint.every == 0

    def save(self, step: int, saved: Saved) -> None:
        """Begin to write a checkpoint. What went wrong with it is reported later, and the run goes on."""
        if step == self.begun:
            return
        self._wait()
        # Apart by now: programs for all devices are to be called in one order in all processes.
        parts = [_parts(leaf) for leaf in jax.tree.leaves(saved.state)]
        self.writing = self.background.submit(functools.partial(self._write, step, saved, parts))
        self.begun = step

    def _write(self, step: int, saved: Saved, parts: list[_Parts]) -> None:
        if not (self.checkpoint.folder / _MARKER).exists():
            self._mark()
        state = [[(begin, np.asarray(part)) for begin, part in of_leaf] for of_leaf in parts]
        save(saved._asdict() | {"state": state}, self._own(step), force=True)
        if jax.process_index() == 0:
            oldest = sorted(self._complete())[-self.checkpoint.keep :][:1]
            for path in self.checkpoint.folder.iterdir() if oldest else ():
                found = _FILE.fullmatch(path.name)
                if found and int(found[1]) < oldest[0]:
                    path.unlink(missing_ok=True)

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, when all is written."""
        self._wait()
        return self._own(step).exists()

    def close(self) -> None:
        """Wait until all is written, and let go of the folder."""
        self._wait()
        self.background.end(float("inf"))

    def _wait(self) -> None:
        writing, self.writing = self.writing, None
        try:
            if writing is not None:
                result(writing)
        except Exception as error:
            self.begun = None
            warnings.warn(
                f"a checkpoint could not be written to {self.checkpoint.folder}: {str(error)[:400]} The run "
                "goes on, earlier checkpoints stay; or stop with Ctrl-C to keep the state in hand.",
                stacklevel=8,
            )


def _listed(lines: list[str]) -> str:
    more = [f"and {len(lines) - 5} more"] if lines[5:] else []
    return "".join(f"\n  {line}" for line in lines[:5] + more)


def _parts(leaf: jax.Array) -> _Parts:
    """As far as it is for this process to save them."""
    shards = [shard for shard in numbers_of(leaf).addressable_shards if shard.replica_id == 0]
    return [(tuple(place.start or 0 for place in shard.index), shard.data) for shard in shards]


def _restored(fresh: jax.Array, parts: _Parts) -> jax.Array:
    """The parts of an array together, on the devices of a fresh one. An array that was free to move stays so:
    one that is tied to its device would be another program."""
    like = numbers_of(fresh)
    whole = np.empty(like.shape, like.dtype)
    for begin, part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(begin, part.shape, strict=True))
        if part.dtype != whole.dtype or whole[place].shape != part.shape:
            raise ValueError(f"it holds {part.dtype}{part.shape} in the place of {whole.dtype}{whole.shape}")
        whole[place] = part
    if sum(part.size for _, part in parts) != whole.size:
        raise ValueError("it does not hold each number of the state once")
    found = jnp.asarray(whole)
    if fresh.committed:
        found = jax.make_array_from_callback(like.shape, like.sharding, lambda place: whole[place])
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(fresh)) if is_key(fresh) else found
