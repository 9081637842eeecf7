"""Which policies a plan compares when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from metis.experiments.config.load import load_config
from metis.experiments.example import example
from metis.planning.outlook import LAMBDAS, Outlook, make_outlook


def outlook(tmp_path: Path, policy: str | None, lambdas: list[float] | None = None) -> Outlook:
    file = tmp_path / "my.toml"
    file.write_text(example("my.toml", policy), "utf-8")
    return make_outlook(load_config(file), "my.toml", lambdas=lambdas)


@pytest.mark.parametrize("policy", [None, "semisync", "semisync_fedavg", "sync_fedavg", "fedrec"])
def test_a_plan_has_policies_of_every_kind(policy: str | None, tmp_path: Path) -> None:
    """The file's own policy counts for its kind: `semisync` has periods, though no lambda."""
    kinds = [one.forecast.kind for one in outlook(tmp_path, policy).policies]
    assert list(dict.fromkeys(kinds)) == ["synchronous", "semi-synchronous", "asynchronous"]


def test_beside_semisync_there_are_policies_with_a_lambda(tmp_path: Path) -> None:
    """Those of the paper, or the ones that are asked for."""
    for lambdas in (None, [1.0, 2.0]):
        found = outlook(tmp_path, "semisync", lambdas)
        own = [one for one in found.policies if one.forecast.policy.name == "semisync"]
        assert len(own) == 1
        tried = {one.forecast.slowest_learner_epochs for one in found.policies} - {None}
        assert set(lambdas or LAMBDAS) <= tried
