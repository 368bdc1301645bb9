"""Work in another thread, while this one waits for the device."""

import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import jax

# How often, in seconds, one that waits looks up: a signal that comes just before a wait does not end it.
_BLINK = 0.1
# Settings of JAX that belong to a thread, and decide what the user's code in it computes, and where.
_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}


class Background:
    """A thread that does what it is given, one task after the other, under the settings of the thread that
    started it. A daemon: it does not keep the program from ending."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        work = functools.partial(contextvars.copy_context().run, self._work, settings)
        self._thread = threading.Thread(target=work, name="measureflow-background", daemon=True)
        self._ended = threading.Event()
        self._thread.start()

    def submit(self, task: Callable[[], Any]) -> Future:
        """Start a task; `result` of what is returned is what the task returned, or raises what it raised."""
        future: Future = Future()
        self._tasks.put((task, future))
        return future

    def end(self, patience: float) -> None:
        """End after the tasks given so far. Wait for that, but at most `patience` seconds."""
        self._tasks.put(None)
        until = time.monotonic() + patience
        while not self._ended.wait(min(_BLINK, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= until:
                return
        self._thread.join()

    def _work(self, settings: dict[str, Any]) -> None:
        with contextlib.ExitStack() as entered:
            entered.callback(self._ended.set)
            for name, value in settings.items():
                entered.enter_context(_SETTINGS[name](value))
            while (given := self._tasks.get()) is not None:
                task, future = given
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
                # A result may be large, and the next task long in coming.
                del given, task, future


def result(future: Future) -> Any:
    """Wait for a task: what it returned, or raise what it raised."""
    while not wait([future], _BLINK).done:
        pass
    return future.result()
