"""Ctrl-C and SIGTERM, noticed between compiled calls instead of in the middle of anything."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """While it is entered, the first SIGINT and any SIGTERM are only noted, by name, in `caught`; the next
    SIGINT does what it always did. Handlers that someone else installed, and threads, are left alone."""

    def __init__(self) -> None:
        self.caught: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        if threading.current_thread() is threading.main_thread():
            for number, usual in ours.items():
                if signal.getsignal(number) == usual:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(*self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name
        # Someone who presses Ctrl-C twice is in a hurry; a scheduler may send SIGTERM twice and still wait.
        self._restore(signal.SIGINT)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if number in self._before:
                signal.signal(number, self._before.pop(number))
