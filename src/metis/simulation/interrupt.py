"""Ctrl-C at a moment that leaves a run whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While active, Ctrl-C raises only where it is welcome; elsewhere it is noted. A second one always raises."""

    def __init__(self) -> None:
        self.pending = False
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
            yield
        finally:
            self._welcome = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._welcome or self.pending:
            raise KeyboardInterrupt
        self.pending = True
