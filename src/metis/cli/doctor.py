"""`metis doctor`: what could keep a controller or a learner from working on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from metis.cli.options import JsonOption, ProxyOption
from metis.cli.output import OUR_ERROR, add, deployed, print_json, stdout
from metis.errors import ConfigError
from metis.net import host_and_port
from metis.text import printable

_TRAINER = (sys.executable, "-m", "metis.cli.trainer")
_STYLES = {"ok": "green", "unknown": "dim", "warning": "yellow", "problem": "bold red"}


def register(app: typer.Typer) -> None:
    add(
        app,
        doctor,
        "metis doctor --controller federation.example.org:7443 --identity hospital-a --site site.py",
        "metis doctor federation.toml --state state --identity main",
    )


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="At the controller: the federation's file.")
    ] = None,
    controller: Annotated[
        str | None, typer.Option("--controller", metavar="HOST:PORT", help="At a site: where the controller listens.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="Kit of this end; without it, as with --insecure.")
    ] = None,
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="At the controller: its state folder.")] = Path(
        "state"
    ),
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FILE", help="Python file with network and data.")
    ] = None,
    work: Annotated[Path, typer.Option("--work", metavar="DIR", help="At a site: the learner's work folder.")] = Path(),
    device: Annotated[
        str | None, typer.Option("--device", help="Device to train or evaluate on, as in cuda:0.")
    ] = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check everything that a controller or a learner needs on this machine, one line each, with what to do.

    Nothing is joined and nothing is changed. Exit codes: 0 there is no problem, though perhaps a warning; 1 there is.
    """
    if (file is None) == (controller is None):
        raise ConfigError("give FILE to examine a controller, or --controller HOST:PORT to examine a site")
    checks = deployed("metis.deployment.doctor")
    chosen = (
        _of_controller(checks, file, state, identity, site, device)
        if file is not None
        else _of_learner(checks, str(controller), identity, site, work, device, proxy)
    )
    failed, findings = 0, []
    for finding in checks.examine(chosen):
        failed += finding.level == "problem"
        findings.append(asdict(finding))
        if not as_json:
            _show(finding)
    if as_json:
        print_json({"ok": not failed, "findings": findings})
    if failed:
        raise typer.Exit(OUR_ERROR)


def _show(finding: Any) -> None:
    advice = f" [bold]→ {escape(printable(finding.advice))}[/]" if finding.advice else ""
    level = f"[{_STYLES[finding.level]}]{finding.level:8}[/]"
    stdout().print(f"{level} {finding.check:12} {escape(printable(finding.text))}{advice}", soft_wrap=True)


def _of_learner(
    checks: Any,
    controller: str,
    identity: Path | None,
    site: Path | None,
    work: Path,
    device: str | None,
    proxy: str | None,
) -> Iterable[Any]:
    address = host_and_port(controller, "federation.example.org:7443")
    route = deployed("metis.deployment.route").route_to(*address, proxy)
    kit = checks.kit_or_none(identity)
    yield "versions", checks.check_versions
    if identity is not None:
        yield "certificate", lambda: checks.check_certificate(identity, "learner")
    yield "name", lambda: checks.check_name_service(route)
    yield "proxy", lambda: checks.check_proxy(route)
    if identity is None or kit is not None:
        yield "controller", lambda: checks.check_connection(route, kit)
    yield "bandwidth", checks.check_bandwidth
    yield from _of_machine(checks, work, "the work folder", device)
    if site is not None:
        name = "site" if kit is None else kit.name
        here = site.resolve()
        yield "code", lambda: checks.check_code(_TRAINER, _trial_settings(here, name), here, name, device)


def _of_controller(
    checks: Any, file: Path, state: Path, identity: Path | None, site: Path | None, device: str | None
) -> Iterable[Any]:
    from metis.deployment.controller.announcement import in_use
    from metis.experiments.config.load import load_config
    from metis.experiments.deploy import check_deployment, settings_document

    config = load_config(file)  # without it there is nothing to examine
    host, port = host_and_port(config.deployment.listen, listen=True)

    def check_file() -> Any:
        check_deployment(config)
        learners = config.learner_count
        return checks.Finding("file", "ok", f"{file} describes a federation of {learners} learners")

    yield "versions", checks.check_versions
    yield "file", check_file
    if identity is not None:
        yield "certificate", lambda: checks.check_certificate(identity, "controller")
    yield "port", lambda: checks.check_port(
        checks.kit_or_none(identity), config.deployment.listen, host, port, in_use(state)
    )  # fmt: skip
    yield from _of_machine(checks, state, "the state folder", device)
    from metis.experiments.bridges import site_path

    here = site.resolve() if site is not None else None if config.site is None else site_path(config)
    settings = settings_document(config)
    yield "code", lambda: checks.check_code(_TRAINER, settings, here, None, device)


def _of_machine(checks: Any, folder: Path, purpose: str, device: str | None) -> Iterable[Any]:
    yield "clock", checks.check_clock
    yield "disk", lambda: checks.check_disk(folder, purpose)
    yield "memory", checks.check_memory
    yield "open files", checks.check_open_files
    yield "device", lambda: checks.check_device(device)


def _trial_settings(site: Path, name: str) -> dict[str, Any]:
    """Plain training of a site's file; the federation's own settings come with its welcome."""
    from metis.experiments.config.load import resolve_config
    from metis.experiments.deploy import settings_document

    federation = {
        "site": {"file": str(site)},
        "learners": [{"name": "site", "names": [name], "batch_size": 16, "time_per_batch": 1.0}],
        "training": {"solver": "vanilla", "learning_rate": 0.001},
        "policy": {"name": "sync_fedavg"},
        "stop": {"rounds": 1},
    }
    return settings_document(resolve_config(federation, "the trial"))
