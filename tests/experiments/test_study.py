"""`Federation.compare`: several policies and seeds, in processes, resumable, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import metis
from metis.errors import ConfigError
from metis.experiments.processes import run_in_processes
from metis.runs.run import Run
from simulation.federations import lively

POLICIES = [metis.sync_fedavg(1), metis.semisync_fedavg(1)]


def shas(comparison: Any) -> list[str]:
    return [run.community_model.sha256() for run in comparison.runs]


def test_a_comparison_is_every_policy_with_every_seed() -> None:
    """Each run is that of `simulate` with the seed; the processes do not matter."""
    expected = [
        lively().with_seed(seed).simulate(policy, seconds=2).community_model.sha256()
        for policy in POLICIES
        for seed in (5, 6)
    ]
    assert len(set(expected)) == 4
    for workers in (0, 1, 2):
        assert shas(lively().compare(POLICIES, seeds=[5, 6], seconds=2, workers=workers)) == expected


def test_the_number_of_seeds_counts_from_the_federations_own() -> None:
    """One seed is the comparison as before; the object shows the table of what it has."""
    comparison = lively().compare({"one": POLICIES[0], "other": POLICIES[1]}, seeds=2, seconds=1, workers=0)
    first = lively().seed
    assert [(run.policy, run.setting.seed) for run in comparison.runs] == [
        ("one", first),
        ("one", first + 1),
        ("other", first),
        ("other", first + 1),
    ]
    assert comparison.several and "over 2 seeds" in repr(comparison) and "±" in comparison._repr_html_()
    single = lively().compare(POLICIES, seconds=1)
    assert not single.several and "seeds" not in repr(single)


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    """The same call finds its runs; what was lost is run again, to the same bits; another policy joins them."""
    whole = lively().compare(POLICIES, seeds=2, seconds=1, workers=0, out=tmp_path / "c")
    lost = tmp_path / "c" / "sync" / f"seed-{lively().seed + 1}"
    kept = tmp_path / "c" / "sync" / f"seed-{lively().seed}" / "events.jsonl"
    before = kept.stat().st_mtime_ns, kept.stat().st_ino
    (lost / "summary.json").unlink()
    again = lively().compare([*POLICIES, metis.fedrec(1)], seeds=2, seconds=1, workers=2, out=tmp_path / "c")
    assert shas(again)[:4] == shas(whole)
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == before


def test_an_interrupted_comparison_continues(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run, then the same call: the bits of a comparison that nothing interrupted."""
    whole = lively().compare(POLICIES, seeds=2, seconds=3, workers=0)
    federation = lively()
    calls = 0
    original = Run.save

    def save(run: Run, folder: Path) -> None:
        nonlocal calls
        calls += 1
        original(run, folder)
        if calls == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save", save)
        with pytest.raises(KeyboardInterrupt):
            federation.compare(POLICIES, seeds=2, seconds=3, workers=0, out=tmp_path)
    assert shas(federation.compare(POLICIES, seeds=2, seconds=3, workers=2, out=tmp_path)) == shas(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": []}, "a comparison needs at least one policy"),
        ({"policies": POLICIES[0]}, "policies must be a list, as in compare([metis.fedrec(), metis.semisync()])"),
        ({"policies": ["sync_fedavg"]}, "policies must be policies such as metis.fedrec(), not 'sync_fedavg'"),
        ({"policies": [POLICIES[0]] * 2}, "two policies are called 'Sync'; name them"),
        ({"seeds": 0}, "seeds is 0; it must be a number from 1 to 10,000"),
        ({"seeds": [1, 1]}, "seeds has 1 twice"),
        ({"seeds": [1.5]}, "seeds must be whole numbers, 0 or more, not [1.5]"),
        ({"watch": print}, "watch is not an option of a comparison"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    given = {"policies": POLICIES, "seconds": 1, **arguments}
    with pytest.raises(ConfigError) as raised:
        lively().compare(given.pop("policies"), **given)
    assert message in str(raised.value)


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    """Runs of other data, another budget, or other files are not taken for those that are asked for."""
    lively().compare(POLICIES, seconds=1, workers=0, out=tmp_path / "c")
    with pytest.raises(ConfigError, match="has a comparison of something else"):
        lively().compare(POLICIES, seconds=2, workers=0, out=tmp_path / "c")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="which is not empty and has no comparison"):
        lively().compare(POLICIES, seconds=1, out=tmp_path / "d")


def test_an_error_in_a_process_ends_all_of_them() -> None:
    """The sentence of the first error arrives as it was raised; an unexpected one names its kind."""

    def wrong(alive: Any) -> None:
        raise ConfigError("this cannot be")

    def broken(alive: Any) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(metis.MetisError, match=r"^this cannot be$"):
        run_in_processes([wrong, lambda alive: None], 2)
    with pytest.raises(metis.MetisError, match="a run failed: RuntimeError: a bug"):
        run_in_processes([broken], 2)


def test_a_run_is_not_overwritten_unless_that_is_asked_for(tmp_path: Path) -> None:
    """`out` with a run in it is refused by name; `overwrite=True` replaces the run."""
    lively().simulate(POLICIES[0], rounds=1, out=tmp_path)
    with pytest.raises(ConfigError, match="which has a run; choose another directory"):
        lively().simulate(POLICIES[0], rounds=2, out=tmp_path)
    assert lively().simulate(POLICIES[0], rounds=2, out=tmp_path, overwrite=True).rounds == 2
