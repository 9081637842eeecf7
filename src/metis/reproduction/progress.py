"""The cells that are running, shown live in a terminal, otherwise as a line for each that ends."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from metis.reproduction.runner import Board, CellState
from metis.text import about

_QUIET_SECONDS = 60.0  # after which a line says what is running


class BoardDisplay:
    """Displays a board: a live table in a terminal, otherwise a line when a cell ends and one a minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._printed: set[str] = set()  # cells that have ended
        self._printed_at = time.monotonic()

    def __enter__(self) -> BoardDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, board: Board) -> None:
        for state in board.states:
            if state.status == "done" and not state.kept and state.cell.name not in self._printed:
                self._printed.add(state.cell.name)
                self._print(board, _progress(state))
        if self._live is not None:
            self._live.update(_table(board), refresh=True)
        elif time.monotonic() - self._printed_at > _QUIET_SECONDS:
            self._print(board, "; ".join(_progress(state) for state in board.states if state.status == "running"))

    def _print(self, board: Board, text: str) -> None:
        count = f"\\[{board.count('done')}/{len(board.states)}]"
        self._console.print(f"{count}  {escape(text)}  {_left(board)}", highlight=False)
        self._printed_at = time.monotonic()


def _table(board: Board) -> Table:
    table = Table.grid(padding=(0, 2))
    for state in board.states:
        if state.status == "running":
            share = min(1.0, state.steps / state.planned_steps) if state.planned_steps else 0.0
            bar = "█" * round(20 * share) + "░" * (20 - round(20 * share))
            table.add_row(Text(bar, style="cyan"), Text(_progress(state)))
    table.add_row(Text(f"{board.count('done')} of {len(board.states)} runs"), Text(_left(board), style="dim"))
    return table


def _progress(state: CellState) -> str:
    metric = "" if state.metric is None else f"  {state.metric:.3f}"
    return f"{state.cell.name}  t={state.at:.0f} s  {state.steps:,} steps{metric}"


def _left(board: Board) -> str:
    left = board.seconds_left
    return "" if left is None else f"(at most {about(left)} left)"
