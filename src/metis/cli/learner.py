"""`metis learner`: one site of a real federation, from its start to the final model.

grpc and cryptography are loaded only when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from metis import __version__
from metis.cli.log import Format, Level, LogFileOption, LogFormatOption, LogLevelOption, log_to
from metis.cli.options import ProxyOption
from metis.cli.output import Reporter, add, deployed, stderr
from metis.cli.storage import KeyOption, choose
from metis.errors import ConfigError, Unreachable
from metis.net import host_and_port, is_loopback

_TRAINER = (sys.executable, "-m", "metis.cli.trainer")
_STYLES = {
    "warning": "yellow", "failed": "red", "refused": "red", "set_aside": "bold red", "error": "bold red",
    "committed": "green", "evaluated": "green", "finished": "bold",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    add(
        app,
        learner,
        "metis learner --controller federation.example.org:7443 --identity kits/hospital-a --site site.py",
        "metis learner --controller 127.0.0.1:7443 --insecure --name north --pace 0.1",
        "metis learner --dry-run --site site.py",
    )


def learner(
    context: typer.Context,
    controller: Annotated[
        str | None, typer.Option("--controller", metavar="HOST:PORT", help="Where the controller listens.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", metavar="DIR", help="Kit of this site: certificate, key and CA.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option("--site", metavar="FILE", help="Python file with this site's network and data; without it, the "
                     "built-in data set and network of the experiment."),
    ] = None,
    flower: Annotated[
        str | None,
        typer.Option("--flower", metavar="APP", help="A Flower app instead of a site file: its folder, a Python file "
                     "or a module, with :NAME if its ClientApp is called otherwise than client_app or app."),
    ] = None,
    node_config: Annotated[
        str | None,
        typer.Option("--node-config", metavar="PAIRS", help="With --flower: what flower-supernode takes, as in "
                     "'partition-id=0 data-path=\"/data\"'."),
    ] = None,
    nvflare: Annotated[
        Path | None,
        typer.Option("--nvflare", metavar="FILE", help="A script of NVFlare's Client API instead of a site file."),
    ] = None,
    nvflare_args: Annotated[
        str | None,
        typer.Option("--args", metavar="TEXT", help="With --nvflare: the script's own arguments, as in "
                     "'--data_root /data'; those of the federation's file by default."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start", metavar="FILE", help="With --flower: the initial model as a safetensors file, for an "
                     "app without a ServerApp that says it."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="DIR", help="Folder for trained updates until the controller has them, and for "
                     "downloads; by default learner-NAME."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the final model; by default --work.")
    ] = None,
    pace: Annotated[
        float | None,
        typer.Option("--pace", metavar="SECONDS", help="Make each batch take at least this long, as on a slower "
                     "machine."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device to train on, as in cuda:0; by default that of the experiment."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="Number of processes that train as one: each batch is divided among "
                     "them, each with a GPU of its own if --device is cuda."),
    ] = 1,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without encryption, to a controller on this machine only.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of this learner, with --insecure.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="What this site allows: metis init --site-policy writes an "
                     "example; by default site-policy.toml in the kit, if it is there."),
    ] = None,
    storage_key: KeyOption = None,
    ckks_key: Annotated[
        Path | None,
        typer.Option("--ckks-key", metavar="FILE", help="Key that the learners share, as made by metis certificates "
                     "ckks: this site takes part in federations that encrypt (policy.ckks), and in no others."),
    ] = None,
    proxy: ProxyOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Connect to nobody: prepare, train one batch, and show everything that would "
                     "leave this site."),
    ] = False,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", metavar="FILE", help="With --dry-run: the federation's file, if this site has "
                     "it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line to stdout.")] = False,
    log_file: LogFileOption = None,
    log_level: LogLevelOption = Level.INFO,
    log_format: LogFormatOption = Format.TEXT,
) -> None:  # fmt: skip
    """Take part in a real federation as one of its learners.

    Connects to the controller, and again whenever the connection is lost; trains the tasks that it gets; ends with the
    federation and leaves community.safetensors. It can be killed and started again at any time: what was trained and
    not yet acknowledged is handed in first. Exit codes: 0 the federation has ended, or the learner was stopped by a
    signal; 2 the controller refuses this learner, or something must be fixed here; 1 any other error.
    """
    site = _own_site(site, flower, node_config, start, nvflare, nvflare_args)
    if dry_run:
        _dry_run(site, identity, name, policy, federation, device, as_json, ckks_key)
        return
    if federation is not None:
        raise ConfigError("--federation is for --dry-run; otherwise the controller sends what is in that file")
    if controller is None:
        raise ConfigError("give --controller HOST:PORT, where the controller listens")
    host, port = host_and_port(controller, "federation.example.org:7443")
    if pace is not None and not 0 <= pace < float("inf"):
        raise ConfigError(f"--pace is {pace:g}; it must be 0 seconds or more")
    report = Reporter(stderr(), as_json, _STYLES, log_to(context, log_file, log_level, log_format))
    deployment = deployed("metis.deployment.learner.process")
    route = deployed("metis.deployment.route").route_to(host, port, proxy)
    who: dict[str, Any]
    if insecure:
        who = _plainly(route, identity, name)
    else:
        who = _by_certificate(route, identity, name, report)
    called = who.pop("called")
    folder = work or Path(f"learner-{called}")
    choose(storage_key, folder)
    rules = _policy_file(policy, identity)
    found = rules.read()
    deployed("metis.deployment.learner.site_policy").check_own_name(found, called)
    if set_rules := found.rules():
        report("info", f"the policy of this site, {rules.path}: {', '.join(set_rules)}")
    process = deployment.LearnerProcess(
        route,
        work=folder,
        child=_TRAINER if processes == 1 else (*_TRAINER, "--processes", str(processes)),
        report=report,
        site=site,
        device=device,
        pace=pace,
        out=out,
        software=f"metis {__version__}",
        policy=rules,
        ckks_key=ckks_key,
        **who,
    )
    import asyncio  # and below: it takes longer to import than the help to show

    code = asyncio.run(_taking_part(process, called, report))
    if code:
        raise typer.Exit(code)


def _own_site(
    site: Path | None,
    flower: str | None,
    node_config: str | None,
    start: Path | None,
    nvflare: Path | None,
    args: str | None,
) -> Path | None:
    """What this site trains with, in the words of `load_site`; None for the built-in data set."""
    for option, value in (("--node-config", node_config), ("--start", start)):
        if flower is None and value is not None:
            raise ConfigError(f"{option} is for a Flower app; give --flower APP")
    if nvflare is None and args is not None:
        raise ConfigError("--args is for a script of NVFlare; give --nvflare FILE")
    names = {"--site": site, "--flower": flower, "--nvflare": nvflare}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: a site has one client")
    if site is not None and not site.is_file():
        raise ConfigError(f"there is no site file {site}")
    if flower is None and nvflare is None:
        return None if site is None else site.resolve()
    from metis.experiments.bridges import flower_path, nvflare_path

    return nvflare_path(nvflare, args) if nvflare is not None else flower_path(str(flower), node_config, start)


def _dry_run(
    site: Path | None,
    identity: Path | None,
    name: str | None,
    policy: Path | None,
    federation: Path | None,
    device: str | None,
    as_json: bool,
    ckks_key: Path | None,
) -> None:
    module = deployed("metis.cli.dry_run")
    if identity is not None:
        name = deployed("metis.deployment.security.identity").load_kit(identity).name
    config = module.federation_of(federation, site, name or "site")
    if name is None:
        name = config.learners[0].learner_names[0]
    import asyncio

    asyncio.run(
        module.show(
            config,
            _policy_file(policy, identity),
            assumed=federation is None,
            site=site,
            name=name,
            device=device,
            trainer=_TRAINER,
            as_json=as_json,
            ckks_key=ckks_key,
        )
    )


def _policy_file(policy: Path | None, identity: Path | None) -> Any:
    """The file that --policy names, or the one in the kit from the moment on that there is one."""
    site_policy = deployed("metis.deployment.learner.site_policy")
    if policy is not None:
        return site_policy.PolicyFile(policy)
    return site_policy.PolicyFile(None if identity is None else identity / site_policy.POLICY, required=False)


async def _taking_part(process: Any, name: str, report: Reporter) -> int:
    """Run the learner, and show in a terminal what it is doing."""
    import asyncio

    from metis.reporting.console import REFRESH_SECONDS, TaskProgress

    with TaskProgress(report.live, name) as progress:
        running = asyncio.create_task(process.run())
        while not running.done():
            progress(*process.doing())
            await asyncio.wait([running], timeout=REFRESH_SECONDS if report.live.is_terminal else None)
    return int(await running)


def _plainly(route: Any, identity: Path | None, name: str | None) -> dict[str, Any]:
    preflight = deployed("metis.deployment.preflight")
    if identity is not None:
        raise ConfigError(
            "--insecure and --identity exclude each other: with a certificate the connection is always encrypted"
        )
    if name is None:
        raise ConfigError("with --insecure there is no certificate with the name of this learner: give --name NAME")
    if not is_loopback(route.host):
        raise ConfigError(
            f"--insecure is only for a controller on this machine, and {route.host} is another one; give --identity "
            f"DIR, or dial 127.0.0.1:{route.port}"
        )
    return {"called": name, "name": name, "preflight": _checked(lambda: preflight.preflight(route, None))}


def _by_certificate(route: Any, identity: Path | None, name: str | None, report: Reporter) -> dict[str, Any]:
    kits, preflight = deployed("metis.deployment.security.identity"), deployed("metis.deployment.preflight")
    if identity is None:
        raise ConfigError(
            "a learner needs its certificate: --identity DIR (made by metis certificates issue), or --insecure --name "
            "NAME for a controller on this machine"
        )
    kit = kits.load_kit(identity)
    kits.check_kit(kit, "learner")
    if name is not None and name != kit.name:
        raise ConfigError(
            f"--name is '{name}', but the certificate in {identity} belongs to '{kit.name}'; leave --name out"
        )
    for warning in kits.warnings(kit):
        report("warning", warning)

    def check() -> None:
        preflight.preflight(route, kits.load_kit(identity))  # read again: it may have been renewed

    return {
        "called": kit.name,
        "kit": identity,
        "authority": kits.fingerprint(kit.authority.public_key()),
        "credentials": lambda: kits.channel_credentials(kits.load_kit(identity)),
        "preflight": _checked(check),
    }


def _checked(check: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """The preflight in a thread; a problem that may pass becomes an OSError, so that it is tried again."""
    import asyncio

    async def preflight() -> None:
        try:
            await asyncio.to_thread(check)
        except Unreachable as problem:
            raise ConnectionError(str(problem)) from None

    return preflight
