"""The same bits for 0, 1 and 2 workers and after a resume, for each way in which learners can train."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import metis
from simulation.federations import FEATURES, blobs, fingerprint, lively, network

COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=50)
INPUTS, TARGETS = blobs()
ITEMS = [
    {"inputs": values[: 1 + k % 3], "weight": 1.0, "labels": label}
    for k, (values, label) in enumerate(zip(INPUTS, TARGETS, strict=True))
]


class Padded(torch.nn.Module):
    """Takes inputs of any length, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = network()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.inside(torch.nn.functional.pad(inputs, (0, FEATURES - inputs.shape[1])))


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(item["inputs"]) for item in items]
    return {
        "inputs": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


WAYS: dict[str, dict[str, Any]] = {
    "adamw": {"solver": metis.AdamW(0.01, keep_state=True)},
    "torch's AdamW": {
        "solver": metis.TorchOptimizer(
            torch.optim.AdamW,
            lr=0.01,
            groups=[{"parameters": "*.bias", "weight_decay": 0.0}],
            scheduler=COSINE,
            keep_state=True,
        ),
        "clip_norm": 1.0,
        "accumulate": 2,
    },
    "mixed precision": {"precision": "bf16"},
    "local parameters": {
        "parameters": {"local": ["4.*", "1.*"]},
        "buffers": "average",
        "solver": metis.AdamW(0.01, keep_state=True),
    },
    "a personal model": {"personal": metis.Ditto(pull=0.5), "solver": metis.AdamW(0.01, keep_state=True)},
    "a personal share": {"personal": metis.APFL(), "solver": metis.MomentumSGD(0.05)},
    "collated": {
        "network": Padded,
        "train": ITEMS,
        "test": ITEMS[:30],
        "collate": pad,
        "metrics": ["accuracy", "auc", "f1"],
    },
    "read ahead": {
        "network": Padded,
        "train": metis.Loader(ITEMS, workers=3, collate=pad),
        "test": metis.Loader(ITEMS[:30], workers=2, prefetch=1, collate=pad),
        "metrics": ["accuracy", "auc", "f1"],
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_same_bits_for_any_number_of_workers_and_after_a_resume(way: str, tmp_path: Path) -> None:
    """A run that is cut off in the middle goes on with what each learner had kept."""
    policy, federation = metis.fedrec(1), lively(**WAYS[way])
    inline = federation.simulate(policy, seconds=3, out=tmp_path / "whole")
    for workers in (1, 2):
        assert fingerprint(federation.simulate(policy, seconds=3, workers=workers)) == fingerprint(inline)

    def cut_off(fold: Any) -> None:
        if fold.now > 1.5:
            raise KeyboardInterrupt

    out = tmp_path / "cut"
    assert federation.simulate(policy, seconds=3, out=out, watch=cut_off).finish_reason == "interrupted"
    resumed = federation.simulate(policy, seconds=3, out=out, resume=True)
    assert fingerprint(resumed) == fingerprint(inline)
    assert inline.community_model.sha256() != federation.initial_model.sha256()
