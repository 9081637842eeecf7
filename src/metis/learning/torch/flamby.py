"""What FLamby's baselines are trained with and judged by: a binary and a survival task, both of a linear network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one output, before the sigmoid."""
    return F.binary_cross_entropy_with_logits(outputs, targets)


def binary_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of examples on the right side of one half."""
    return ((outputs > 0) == (targets > 0.5)).double().mean()


def cox_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over a batch of Cox's negative partial log-likelihood; targets are (event, time), as in FLamby.

    Each event is compared with those of the batch that lived at least as long.
    """
    order = torch.argsort(targets[:, 1], descending=True, stable=True)
    scores, events = outputs[order, 0], targets[order, 0]
    return ((torch.logcumsumexp(scores, 0) - scores) * events).mean()


def concordance(outputs: Tensor, targets: Tensor) -> float:
    """The C-index: of all pairs in which one is known to have died first, the share whose risk says so; ties half."""
    risk, events, times = outputs[:, 0].double(), targets[:, 0] > 0.5, targets[:, 1]
    # Who died at this time died before those who were still alive then.
    earlier = (times[:, None] < times[None, :]) | ((times[:, None] == times[None, :]) & ~events[None, :])
    known = earlier & events[:, None]
    known.fill_diagonal_(False)
    pairs = int(known.sum())
    if pairs == 0:
        return float("nan")
    higher, equal = risk[:, None] > risk[None, :], risk[:, None] == risk[None, :]
    return float((higher & known).sum() + 0.5 * (equal & known).sum()) / pairs
