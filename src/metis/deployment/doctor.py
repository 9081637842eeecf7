"""`metis doctor`: what could keep a controller or a learner from working here, each in one line with what to do.

A check that fails, in whatever way, never hides another one. Nothing is joined and nothing stays behind on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metis import __version__
from metis.core.model import Layout
from metis.deployment.preflight import preflight, serving_problem
from metis.deployment.route import Route
from metis.deployment.security.identity import (
    REVOKED,
    Kit,
    Revocations,
    check_kit,
    fingerprint,
    load_kit,
    moment,
    warnings,
)
from metis.deployment.trainer.child import Child
from metis.deployment.wire.models import model_bytes
from metis.errors import ConfigError, MetisError, described
from metis.system import disk, monotonic
from metis.text import plural, seconds, size

Level = Literal["ok", "unknown", "warning", "problem"]
_SLOW_SYNC = 0.05  # seconds of an fsync that slow a controller down
_FEW_FILES = 1024
_TRIAL_SECONDS = 600.0
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    level: Level
    text: str
    advice: str = ""


Check = tuple[str, Callable[[], Finding | Iterable[Finding]]]


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """The findings of all checks, in order; an error in one is a finding too."""
    for name, check in checks:
        try:
            found = check()
            yield from [found] if isinstance(found, Finding) else found
        except MetisError as problem:
            yield Finding(name, "problem", str(problem))
        except Exception as problem:
            yield Finding(name, "problem", f"could not be checked: {described(problem)}")


# --- this machine -----------------------------------------------------------------------------------


def check_versions() -> Finding:
    found = {"metis": __version__, "python": platform.python_version()}
    missing = []
    for package in ("torch", "grpcio", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        return Finding("versions", "problem", f"{text}; {' and '.join(missing)} missing", "pip install '.[deploy]'")
    return Finding("versions", "ok", f"{text}; metis must be the same at both ends")


def check_clock() -> Finding:
    """Whether the kernel keeps the clock; the other machine's is known only once a learner has joined."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    both = "the difference to the other end is not known before a learner joins, which warns above 60 s"
    try:
        timex = (ctypes.c_int * 128)()  # struct timex; its modes are 0: nothing is set
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        state = -1
    if state < 0:  # there is no such call here, or it is not allowed
        return Finding("clock", "unknown", f"{now}; whether it is synchronized is not known here; {both}")
    status = ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value
    if state == 5 or status & _UNSYNCHRONIZED:
        return Finding(
            "clock", "warning", f"{now}; the kernel says that no time service keeps it; {both}",
            "start chrony or systemd-timesyncd, unless the host of this virtual machine does it",
        )  # fmt: skip
    return Finding("clock", "ok", f"{now}, synchronized; {both}")


def check_disk(folder: Path, purpose: str, needed: int = 0) -> Iterator[Finding]:
    """Room and speed of the disk on which this folder is or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    total, free = disk().space(there)
    text = f"{size(free)} of {size(total)} free for {purpose} {folder}"
    if needed and free < needed:
        yield Finding("disk", "problem", text, f"make room: about {size(needed)} are needed")
    elif free < total // 20 and free < 20 * 10**9:
        yield Finding("disk", "warning", text, "make room: less than 5 % are left")
    else:
        yield Finding("disk", "ok", text)
    took = []
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".metis-doctor-") as file:
            for _ in range(5):
                began = monotonic()
                file.write(bytes(4096))
                file.flush()
                disk().fsync(file.fileno())
                took.append(monotonic() - began)
    except OSError as problem:
        advice = f"have the user of this process own {there}"
        yield Finding("disk", "problem", f"{there} cannot be written: {problem.strerror}", advice)
        return
    median = statistics.median(took)
    text = f"a write is on the disk after {seconds(median)}"
    if median > _SLOW_SYNC:
        yield Finding("disk", "warning", text, "each update and event waits for it: a local SSD is better")
    else:
        yield Finding("disk", "ok", text)


def check_memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return Finding("memory", "unknown", "how much is available is not known here")
    text = f"{size(available)} available"
    with contextlib.suppress(OSError, ValueError):  # a container or a service may have less
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        text += f", at most {size(limit)} for this service"
        available = min(available, limit)
    if available < 10**9:
        return Finding("memory", "warning", text, "torch alone takes several hundred MB")
    return Finding("memory", "ok", text)


def check_open_files() -> Finding:
    if sys.platform == "win32":
        return Finding("open files", "unknown", "there is no limit to look up here")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _FEW_FILES:
        return Finding(
            "open files", "warning", f"at most {limit:,} open files", "raise it: ulimit -n 65536, or LimitNOFILE="
        )
    return Finding("open files", "ok", f"at most {limit:,} open files" if limit >= 0 else "any number of open files")


def check_device(device: str | None) -> Finding:
    """What torch can train on; asked in another process, because a broken driver may end it."""
    program = (
        "import torch; c = torch.cuda; print(', '.join(f'cuda:{i} {c.get_device_name(i)}' "
        "for i in range(c.device_count())) or ('mps' if torch.backends.mps.is_available() else '')); "
        + (f"torch.zeros(8, device={device!r}).sum().item()" if device else "")
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    said = done.stderr.strip().splitlines()
    if done.returncode:
        reason = said[-1] if said else f"torch ended with {done.returncode}"
        return Finding("device", "problem", reason[:300], "check the driver, or choose another --device")
    found = done.stdout.strip()
    processors = plural(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "processor"
    )
    if device:
        return Finding("device", "ok", f"{device} works ({found or 'no GPU'}, {processors})")
    return Finding("device", "ok", f"{found}, {processors}" if found else f"no GPU, {processors}")


# --- the way to the controller ------------------------------------------------------------------------


def check_name_service(route: Route) -> Finding:
    host = route.host
    if route.proxy is not None:
        return Finding("name", "ok", f"the proxy resolves {host}")
    try:
        found = socket.getaddrinfo(host, route.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        advice = "check the spelling and the name service; behind a proxy, set https_proxy"
        return Finding("name", "problem", f"{host} is unknown: {reason}", advice)
    addresses = sorted({str(address[0]) for *_, address in found})
    return Finding("name", "ok", f"{host} is {', '.join(addresses)}")


def check_proxy(route: Route) -> Finding:
    """Which proxy the environment names for the controller."""
    if route.proxy is None:
        return Finding("proxy", "ok", "none for this controller: it is dialled directly")
    return Finding("proxy", "ok", f"{route.proxy}; it must allow CONNECT to {route.where}")


def check_connection(route: Route, kit: Kit | None) -> Finding:
    began = monotonic()
    preflight(route, kit)
    how = "in plain text" if kit is None else "and accepts our certificate"
    return Finding("controller", "ok", f"{route.where} answers {how}, in {seconds(monotonic() - began)}")


def check_bandwidth() -> Finding:
    return Finding("bandwidth", "unknown", "not measured: the controller serves models to members only; the learner's "
                   "own lines show it at each transfer")  # fmt: skip


# --- certificates -------------------------------------------------------------------------------------


def check_certificate(folder: Path, role: str) -> Iterator[Finding]:
    kit = load_kit(folder)
    check_kit(kit, role)
    hosts = f", for {', '.join(kit.hosts)}" if kit.hosts else ""
    # Two administrators who compare this find out whether they have the same CA.
    authority = f"its CA ({fingerprint(kit.authority.public_key())}) until {moment(kit.authority.not_valid_after_utc)}"
    text = f"{kit}{hosts}, valid until {moment(kit.not_after)}; {authority}"
    yield Finding("certificate", "ok", text)
    for warning in warnings(kit):
        yield Finding("certificate", "warning", warning, f"metis certificates renew {kit.name}, at the CA")
    if role != "controller":
        yield Finding("certificate", "unknown", "whether it was revoked is known to the controller only")
        return
    Revocations(kit).reason(0)
    known = f"{REVOKED} is in order" if (folder / REVOKED).exists() else f"without {REVOKED} nobody is revoked"
    yield Finding("certificate", "ok", known)


def check_port(kit: Kit | None, listen: str, host: str, port: int, running: bool) -> Finding:
    if running:
        return Finding("port", "ok", f"a controller is running on this state folder and listens on {listen}")
    problem = serving_problem(kit, host, port)
    if problem is not None:
        return Finding("port", "problem", problem)
    return Finding(
        "port", "ok", f"{listen} is free; whether sites can reach it, only a site can tell: metis doctor there"
    )


# --- the site's code ------------------------------------------------------------------------------------


def check_code(
    command: Sequence[str], settings: Mapping[str, Any], site: Path | None, name: str | None, device: str | None
) -> Iterator[Finding]:
    """One trial batch, or for a controller the initial model and one evaluation, in a trainer of its own."""
    with tempfile.TemporaryDirectory(prefix="metis-doctor-") as folder:
        yield from asyncio.run(_tried(command, settings, site, name, device, Path(folder)))


async def _tried(
    command: Sequence[str],
    settings: Mapping[str, Any],
    site: Path | None,
    name: str | None,
    device: str | None,
    folder: Path,
) -> list[Finding]:
    child, found = Child(command), []
    model = folder / "model"
    try:
        began = monotonic()
        ready = await asyncio.wait_for(
            child.call(
                "prepare", settings=settings, site=None if site is None else str(site), name=name, index=0,
                layout=None, memory=None, device=device, pace=None,
            ),
            _TRIAL_SECONDS,
        )  # fmt: skip
        what = "the built-in data set" if site is None else site.name if site.exists() else "the site's client"
        examples = ready["examples"] if name is not None else ready["evaluation_examples"]
        kind = "training" if name is not None else "held-out"
        text = f"{what} is ready in {seconds(monotonic() - began)}: {examples:,} {kind} examples"
        found.append(Finding("code", "ok", text))
        await asyncio.wait_for(child.call("initial", seed=None, out=str(model)), _TRIAL_SECONDS)
        length = model_bytes(Layout.from_json(ready["layout"]))
        began = monotonic()
        if name is not None:
            call = child.call(
                "train", task=1, model=str(model), steps=1, seconds=None, rate=1.0, out=str(folder / "update")
            )
            await asyncio.wait_for(call, _TRIAL_SECONDS)
            took = f"one batch of {ready['batch_size']} in {seconds(monotonic() - began)}, warm-up included"
            found.append(Finding("trial", "ok", f"{took}; a model has {size(length)}"))
        elif examples:
            await asyncio.wait_for(child.call("evaluate", model=str(model)), _TRIAL_SECONDS)
            took = seconds(monotonic() - began)
            found.append(Finding("trial", "ok", f"one evaluation in {took}; a model has {size(length)}"))
    except MetisError as problem:
        advice = "fix the site's file or data; its text stays on this machine"
        found.append(Finding("trial" if found else "code", "problem", str(problem), advice))
    except asyncio.TimeoutError:
        found.append(Finding("trial", "problem", f"no answer within {_TRIAL_SECONDS:.0f} s", "try a smaller data set"))
    finally:
        child.kill()
        await child.close()
    return found


def kit_or_none(folder: Path | None) -> Kit | None:
    """The kit if it can be used at all; what is wrong with it is another check's finding."""
    try:
        return None if folder is None else load_kit(folder)
    except ConfigError:
        return None
