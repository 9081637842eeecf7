"""The process of `metis controller`: a real federation from its file and its state folder to the final model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis import __version__
from metis.cli.output import Reporter
from metis.core.model import Layout
from metis.deployment.controller.alerts import Certificates
from metis.deployment.controller.announcement import announce, withdraw
from metis.deployment.controller.callers import (
    Administrators,
    administrator_by_certificate,
    administrator_by_name,
    identify_by_certificate,
    identify_by_name,
)
from metis.deployment.controller.durable import initial_model
from metis.deployment.controller.notify import deliver, notification
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.session import Context
from metis.deployment.controller.state import State
from metis.deployment.controller.status_server import StatusServer
from metis.deployment.preflight import serving_problem
from metis.deployment.security.identity import Revocations, check_kit, load_kit, server_credentials, warnings
from metis.deployment.storage import storage
from metis.deployment.trainer.child import Child
from metis.deployment.wire.models import model_parts, read_model
from metis.errors import ConfigError, LearnerError
from metis.experiments.build import build_stop
from metis.experiments.compose import compose
from metis.experiments.deploy import (
    check_deployment,
    check_same_run,
    deployed,
    make_notify_settings,
    make_plan,
    settings_document,
)
from metis.experiments.start import started_from
from metis.kernels import use_all_processors
from metis.net import host_and_port, is_loopback
from metis.privacy.encrypted import encrypted_start, read_key
from metis.privacy.keys import Peers
from metis.reporting.console import RunProgress
from metis.runs.folds import RunFold
from metis.runs.run import CONFIG, Run
from metis.system import keep_what_is_loaded

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig

TRAINER = (sys.executable, "-m", "metis.cli.trainer")


class _ChildEvaluator:
    """Evaluates in the controller's own child process, which knows the network and the held-out data."""

    def __init__(self, child: Child, prepare: dict[str, Any]) -> None:
        self._child, self._prepare = child, prepare
        self._prepared_pid: int | None = None

    async def prepare(self) -> dict[str, Any]:
        answer = await self._child.call("prepare", **self._prepare)
        self._prepared_pid = self._child.pid
        return dict(answer)

    async def evaluate(self, model: Path) -> dict[str, float]:
        if not self._child.alive or self._child.pid != self._prepared_pid:
            await self.prepare()
        return dict((await self._child.call("evaluate", model=str(model)))["metrics"])


def run_controller(
    config: ExperimentConfig,
    folder: Path,
    *,
    identity: Path | None,
    insecure: bool,
    listen: str | None,
    http: str | None,
    site: Path | None,
    device: str | None,
    report: Reporter,
    watch: Callable[[RunFold], None] | None = None,
    ckks_key: Path | None = None,
) -> Run | None:
    """Run the federation of this file until its end; None if it was asked to stop before that."""
    check_deployment(config)
    public_key = _public_key(config, ckks_key)
    listen = listen or config.deployment.listen
    http = config.deployment.http if http is None else http
    host, port = host_and_port(listen, "0.0.0.0:7443", listen=True)
    credentials: Any = None  # of gRPC, which is known in deployment only
    certificates: Certificates = tuple
    peers: Peers | None = None
    if insecure:
        if not is_loopback(host):
            raise ConfigError(
                f"--insecure works on one machine only, but {host} can be reached from others; listen on "
                f"127.0.0.1:{port}, or give --identity DIR"
            )
        identify: Callable[[Context], str] = identify_by_name
        administrators: Administrators = administrator_by_name
        problem = serving_problem(None, host, port)
    else:
        if identity is None:
            raise ConfigError(
                "a controller needs certificates: give --identity DIR (made by metis certificates issue), or "
                "--insecure on loopback"
            )
        kit = load_kit(identity)
        check_kit(kit, "controller")
        for warning in warnings(kit):
            report("warning", warning)
        credentials = server_credentials(kit)
        peers = Peers(kit.authority)
        ends: dict[str, datetime] = {}
        revocations = Revocations(kit)
        identify, administrators = identify_by_certificate(revocations, ends), administrator_by_certificate(revocations)
        certificates = partial(_ending, identity, ends)
        problem = serving_problem(kit, host, port)
    if problem is None and http:
        # Now, before minutes are spent on the initial model.
        problem = serving_problem(None, *host_and_port(http, listen=True))
    if problem is not None:
        raise ConfigError(problem)
    use_all_processors(in_service=True, scratch=None if storage().sealed else folder)

    def watched(fold: RunFold) -> None:
        progress(fold)
        if watch is not None:
            watch(fold)

    label = config.policy[0].label or config.policy[0].name
    with (
        State.open(folder, config.deployment.durability) as state,
        RunProgress(report.live, label, build_stop(config), "waiting for learners") as progress,
    ):
        keep_what_is_loaded()
        return asyncio.run(
            _serve(
                config,
                state,
                folder,
                identify,
                administrators,
                credentials,
                certificates,
                peers,
                listen,
                http,
                site,
                device,
                report,
                watched,
                public_key,
            )
        )


def _public_key(config: ExperimentConfig, path: Path | None) -> bytes | None:
    """The controller's part of the keys of a federation that encrypts."""
    if (compose(config.policy[0]).ckks is None) != (path is None):
        raise ConfigError(
            "policy.ckks: a controller adds encrypted models up with its part of the keys: give --ckks-key FILE"
            if path is None
            else f"--ckks-key {path} is for a federation that encrypts, and the policy of this one has no ckks"
        )
    return None if path is None else read_key(path)


async def _serve(
    config: ExperimentConfig,
    state: State,
    folder: Path,
    identify: Callable[[Context], str],
    administrators: Administrators,
    credentials: Any,
    certificates: Certificates,
    peers: Peers | None,
    listen: str,
    http: str,
    site: Path | None,
    device: str | None,
    report: Reporter,
    watch: Callable[[RunFold], None] | None,
    public_key: bytes | None,
) -> Run | None:
    child = Child(TRAINER)
    facts = state.facts()
    config = deployed(config, None if facts is None else facts["experiment"])
    prepare = {
        "settings": settings_document(config), "site": None if site is None else str(site), "name": None, "index": 0,
        "layout": None, "memory": None, "device": device, "pace": None,
    }  # fmt: skip
    evaluator = _ChildEvaluator(child, prepare)
    try:
        if facts is None:
            facts = await _begin(config, state, folder, child, evaluator, report, public_key)
        else:
            check_same_run(config, facts["experiment"])
        layout = Layout.from_json(facts["layout"])
        initial = initial_model(state, facts["initial"], layout)
        plan = make_plan(
            config, initial, facts["metric"], facts["higher_is_better"], facts.get("metrics", ()), facts["experiment"],
            bool(facts.get("validation_examples")), facts.get("frozen", ""), public_key,
        )  # fmt: skip
        run_folder = folder / "run"
        run_folder.mkdir(exist_ok=True)
        head = f"# Resolved by metis {__version__}; every default is written out.\n\n"
        (run_folder / CONFIG).write_text(head + config.to_toml(), encoding="utf-8")
        process = ControllerProcess(
            plan,
            state,
            run_folder,
            evaluator=evaluator if facts["evaluation_examples"] and plan.encrypted is None else None,
            identify=identify,
            report=report,
            watch=watch,
            certificates=certificates,
            administrators=administrators,
            peers=peers,
        )
        report("info", f"one durable commit takes {state.measure_commit() * 1000:.2f} ms on this disk")
        loop = asyncio.get_running_loop()
        _stop_on_signals(loop, process)
        status = StatusServer(http, process.status, loop) if http else None
        serving = asyncio.create_task(process.serve(listen, credentials))
        try:
            while not (hasattr(process, "address") or serving.done()):
                await asyncio.sleep(0.01)
            if not serving.done():
                announce(folder, listen=process.address, http=None if status is None else status.address, run=state.run)
            return process.result if await serving else None
        finally:
            withdraw(folder)
            if status is not None:
                status.close()
    finally:
        await child.close()


def _ending(identity: Path, learners: dict[str, datetime]) -> Iterator[tuple[str, datetime]]:
    """When the certificates end of the controller, which may have been renewed, of the CA and of the learners."""
    with contextlib.suppress(ConfigError):  # half copied: looked at again later
        kit = load_kit(identity)
        yield f"the certificate of {kit}", kit.not_after
        yield "the certificate of the CA", kit.authority.not_valid_after_utc
    for name, end in list(learners.items()):
        yield f"the certificate of learner '{name}'", end


def send_test_notification(config: ExperimentConfig, folder: Path) -> list[str]:
    """Send one in every way that the file configures; one sentence for each that failed."""
    settings = make_notify_settings(config)
    if not (settings.command or settings.webhook):
        raise ConfigError("nobody is notified: give [deployment.notify] with a command or a webhook")
    text = "a test notification: what is configured in [deployment.notify] works"
    return deliver(settings, notification("test", text, {"state": str(folder)}))


async def _begin(
    config: ExperimentConfig,
    state: State,
    folder: Path,
    child: Child,
    evaluator: _ChildEvaluator,
    report: Reporter,
    public_key: bytes | None,
) -> dict[str, Any]:
    """Make the initial model and write down what the run is begun with."""
    report("info", "making the initial model")
    out = folder / "initial.tmp"
    try:
        prepared = await evaluator.prepare()
        await child.call("initial", seed=None, out=str(out))
    except LearnerError as problem:
        raise ConfigError(str(problem)) from problem
    layout = Layout.from_json(prepared["layout"])
    model = read_model(out, layout)
    if config.training.initial_model is not None:
        model = started_from(config.training.initial_model, model)
        report("info", f"starting from {config.training.initial_model}, sha256 {model.network.sha256()}")
    if public_key is not None:
        model = encrypted_start(model, public_key)
    blob = state.put_blob(model_parts(model))
    out.unlink()
    facts = {
        "experiment": config.to_dict(),
        "layout": prepared["layout"],
        "initial": blob,
        "metric": prepared["metric"],
        "metrics": prepared["metrics"],
        "higher_is_better": prepared["higher_is_better"],
        "evaluation_examples": prepared["evaluation_examples"],
        "validation_examples": prepared.get("validation_examples", 0),
        "frozen": prepared.get("frozen", ""),
    }
    state.begin(facts)
    return facts


def _stop_on_signals(loop: asyncio.AbstractEventLoop, process: ControllerProcess) -> None:
    asked = 0

    def stop(name: str) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:  # everything that counts is on disk already
            os._exit(130)
        process.drain(f"the controller was asked to stop ({name})")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)
