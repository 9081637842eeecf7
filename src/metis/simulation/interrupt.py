"""Ctrl-C at a moment that leaves a run whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While active, Ctrl-C raises where it is welcome; elsewhere it is noted, and raises if one was noted already."""

    def __init__(self) -> None:
        self.pending = False
        self.torn = False  # it was raised where it is not welcome: the run may be in the middle of a change
        self._welcome = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def welcome(self) -> Iterator[None]:
        """In here an interruption may come at any instruction."""
        self._welcome = True
        try:
            if self.pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._welcome = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._welcome:
            raise KeyboardInterrupt
        if self.pending:
            self.torn = True
            raise KeyboardInterrupt
        self.pending = True
