"""Training loops that others wrote: bounded by a budget, timed by the step and seeded, without a change to them.

A loop over a `DataLoader` with an optimizer of torch need not know of budgets: each step of its optimizer takes one
turn of the budget, and when there is none left, the loaders that it trains from are at their end.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader


class Bound:
    """What became of a budget: one turn of it is one step of an optimizer."""

    def __init__(self, turns: Iterator[Any]) -> None:
        self._turns = turns
        self._training: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()  # loaders whose batches made steps
        self._latest: weakref.ref[DataLoader[Any]] | None = None  # the loader that handed out the last batch
        self.steps = 0
        self.ended = False
        self.holds = False  # whether steps came from a loader, so that it can end them
        self.problem: BaseException | None = None  # raised where the next turn was asked for
        self.batch_size = 0  # of the loader that trains; 0 if none does
        self.epoch_steps = 0  # batches of that loader

    def step_done(self, *_: Any) -> None:
        """A step of an optimizer, whichever it is; takes the turn of the next one."""
        if self.ended:
            return  # it had no effect
        self.steps += 1
        loader = None if self._latest is None else self._latest()
        if loader is not None and loader not in self._training:
            self._training.add(loader)
            self.holds = True
            self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
            with contextlib.suppress(TypeError):  # of an iterable dataset
                self.epoch_steps = len(loader)
        try:
            next(self._turns)
        except StopIteration:
            self.ended = True
        except BaseException as problem:
            # The loop that made this step may catch it, so it is raised again behind it.
            self.problem, self.ended = problem, True
            raise

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """A loop that fetches batches ahead has one left when the budget ends; without gradients it changes nothing."""
        if self.ended:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def called(self, own: float | None) -> None:
        """After a call of the loop; its steps are counted already."""

    def over(self, loader: DataLoader[Any]) -> bool:
        """Whether this loader has no more batches to give."""
        return self.ended and loader in self._training

    def handed_out(self, loader: DataLoader[Any]) -> None:
        if torch.is_grad_enabled():  # otherwise something is measured, not trained
            self._latest = weakref.ref(loader)


class _Batches:
    """The iterator of a loader, until the budget ends."""

    def __init__(self, loader: DataLoader[Any], batches: Any, bound: Bound) -> None:
        self._loader, self._batches, self._bound = loader, batches, bound

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        if self._bound.over(self._loader):
            raise StopIteration
        batch = next(self._batches)
        self._bound.handed_out(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


@contextlib.contextmanager
def bounded(turns: Iterator[Any]) -> Iterator[Bound]:
    """Within it, every loop over a `DataLoader` that trains ends with these turns; one is taken already."""
    bound = Bound(turns)
    original = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Any:
        return _Batches(loader, original(loader), bound)

    handles = register_optimizer_step_pre_hook(bound.before_step), register_optimizer_step_post_hook(bound.step_done)
    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield bound
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it, what is drawn from the global generators is the same for the same seed; behind it, as before."""
    kept, kept_by_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - others draw from it
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(kept_by_numpy)  # noqa: NPY002
