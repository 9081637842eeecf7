"""Several policies with several seeds on one federation: `Federation.compare`."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.core.policy import Policy
from metis.errors import ArgumentError, ConfigError
from metis.experiments.config.load import slug
from metis.experiments.processes import can_fork, processors, run_in_processes
from metis.experiments.sweep import seeds_from
from metis.runs.checkpoint import CHECKPOINT
from metis.runs.run import Run, is_finished
from metis.runs.trace import write_json

if TYPE_CHECKING:
    from metis.experiments.federation import Federation

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class _Planned:
    """One run of a comparison and the name of its directory."""

    policy: Policy
    seed: int
    name: str


def compare_policies(
    federation: Federation,
    policies: Sequence[Policy] | Mapping[str, Policy],
    seeds: int | Sequence[int],
    workers: int | None,
    out: str | Path | None,
    options: Mapping[str, Any],
) -> list[Run]:
    """Run every policy with every seed, but for the runs that `out` has already; in the order of the policies."""
    for name in ("watch", "progress", "resume", "overwrite"):
        if name in options:
            raise ArgumentError(f"{name} is not an option of a comparison", name)
    plan = _planned(_named(policies), seeds_from(seeds, federation.seed))
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"out is {out}, which is a file; give a directory")
    if out is not None:
        return _run(federation, plan, Path(out), workers, options)
    with tempfile.TemporaryDirectory(prefix="metis-") as folder:
        runs = _run(federation, plan, Path(folder), workers, options)
        for run in runs:
            _, run.folder = run.best_model, None  # which is read while its file is there
    return runs


def _named(policies: Sequence[Policy] | Mapping[str, Policy]) -> list[Policy]:
    if isinstance(policies, Policy):
        raise ConfigError("policies must be a list, as in compare([metis.fedrec(), metis.semisync()])")
    given = list(policies.values()) if isinstance(policies, Mapping) else list(policies)
    for entry in given:
        if not isinstance(entry, Policy):
            raise ConfigError(f"policies must be policies such as metis.fedrec(), not {entry!r}")
    if isinstance(policies, Mapping):
        given = [replace(entry, label=label) for label, entry in policies.items()]
    if not given:
        raise ConfigError("a comparison needs at least one policy")
    names = [slug(entry.label) for entry in given]
    for entry, name in zip(given, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(
                f"two policies are called '{entry.label}'; name them, as in compare({{'one': ..., 'other': ...}})"
            )
    return given


def _planned(entries: Sequence[Policy], seeds: Sequence[int]) -> list[_Planned]:
    return [
        _Planned(entry, seed, f"{slug(entry.label)}/seed-{seed}" if len(seeds) > 1 else slug(entry.label))
        for entry in entries
        for seed in seeds
    ]


def _run(
    federation: Federation, plan: Sequence[_Planned], folder: Path, workers: int | None, options: Mapping[str, Any]
) -> list[Run]:
    by_seed = {seed: federation.with_seed(seed) for seed in dict.fromkeys(planned.seed for planned in plan)}
    identities = {planned.name: _identity(by_seed[planned.seed], planned.policy, options) for planned in plan}
    _check(folder, identities)
    seeds = list(by_seed)
    document = {
        "name": folder.name,
        "finished": False,
        "runs": [planned.name for planned in plan],
        **({"seeds": seeds} if len(seeds) > 1 else {}),
        "identities": identities,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMPARISON, document)
    left = [planned for planned in plan if not is_finished(folder / planned.name)]
    device = getattr(federation.engine, "device", "cpu")
    parallel = processors() if workers is None else workers
    if options.get("pool") == "ray" or federation.threads != 1 or not can_fork(str(device)):
        parallel = 0

    def work(planned: _Planned) -> Callable[[Callable[[], None]], None]:
        def run(alive: Callable[[], None]) -> None:
            made = by_seed[planned.seed].simulate(
                planned.policy,
                out=folder / planned.name,
                resume=(folder / planned.name / CHECKPOINT).exists(),
                overwrite=True,
                progress=False,
                watch=lambda fold: alive(),
                **options,
            )
            if made.finish_reason == "interrupted":
                raise KeyboardInterrupt

        return run

    works = [work(planned) for planned in left]
    if parallel > 1 and len(works) > 1:
        if not run_in_processes(works, parallel):
            raise KeyboardInterrupt
    else:
        for each in works:
            each(lambda: None)
    write_json(folder / COMPARISON, {**document, "finished": True})
    return [Run.load(folder / planned.name) for planned in plan]


def _identity(federation: Federation, policy: Policy, options: Mapping[str, Any]) -> str:
    """A digest of all that decides the result of a run."""
    session = federation.session(policy, **options)
    return hashlib.sha256(json.dumps(session.identity, sort_keys=True).encode()).hexdigest()


def _check(folder: Path, identities: Mapping[str, str]) -> None:
    """Refuse a directory that has something else: finished runs in it are taken as they are."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        before = json.loads((folder / COMPARISON).read_text("utf-8"))["identities"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"out is {folder}, which is not empty and has no comparison; choose another") from None
    for name, identity in identities.items():
        if before.get(name, identity) != identity:
            raise ConfigError(
                f"out is {folder}, which has a comparison of something else ({name} differs); choose another"
            )
