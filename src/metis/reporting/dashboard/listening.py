"""Sockets and addresses of the dashboard, and the process that serves it in the background of a run."""

from __future__ import annotations

import http.client
import ipaddress
import secrets
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from metis.errors import ConfigError
from metis.net import join_address, listen_on


def bind(listen: str | None) -> socket.socket:
    """A socket at HOST:PORT; by default at port 8484 of loopback, or any free one."""
    return listen_on(listen or "127.0.0.1:8484", "the dashboard", or_any_port=listen is None)


def address_of(bound: socket.socket, token: str | None) -> str:
    """What to type into a browser; only the first visit needs the token in it."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://{join_address(host, port)}/" + ("" if token is None else f"?token={token}")


def new_token() -> str:
    return secrets.token_urlsafe(24)


def visit(url: str, token: str | None) -> str:
    """What to type into a browser to see the dashboard that is served there; raises why it could not be seen."""
    address = url + ("" if token is None else f"?token={token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
    try:
        with opener.open(address, timeout=10) as answer:
            page = answer.read(10_000)
    except urllib.error.HTTPError as refusal:
        with refusal:
            if refusal.code in (401, 403):
                how = "give its token with --token-file" if token is None else "the token is not the one that it has"
                raise ConfigError(f"the dashboard at {url} requires a token: {how}") from None
            raise ConfigError(f"{url} is not a Metis dashboard: it answers {refusal.code}") from None
    except (OSError, http.client.HTTPException) as problem:
        reason = getattr(problem, "reason", problem)
        raise ConfigError(
            f"there is no dashboard at {url}: {getattr(reason, 'strerror', None) or reason}; on that machine: metis "
            "dashboard DIR --listen HOST:PORT, or without it here ssh -L 8484:127.0.0.1:8484 HOST"
        ) from None
    if b"<title>Metis dashboard</title>" not in page:
        raise ConfigError(f"{url} is not a Metis dashboard")
    return address


class DashboardProcess:
    """The dashboard in a process of its own with low priority, so that it does not slow down the run.

    The process ends with this one, however that ends; pages that are open keep the final state.
    """

    def __init__(self, folder: Path, bound: socket.socket) -> None:
        self.url = address_of(bound, None)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        with bound:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "metis.reporting.dashboard", str(folder), str(bound.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[bound.fileno()],
                start_new_session=True,  # Ctrl-C is for the run; the dashboard shows how it ended
            )

    def end(self) -> str | None:
        """Ask it to end, and do not wait for that; what went wrong with it before, if something did."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            _ENDING.add(self)  # a moment later it is gone; until then it is not forgotten
            return None
        return self._complaint()

    def close(self) -> str | None:
        """The same, and wait for it."""
        complaint = self.end()
        if self not in _ENDING:
            return complaint
        _ENDING.discard(self)
        try:
            self._process.wait(8.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return self._complaint()

    def _complaint(self) -> str | None:
        with self._errors as file:
            file.seek(0)
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return None if self._process.returncode == 0 else (lines[-1] if lines else "it was killed")


_ENDING: set[DashboardProcess] = set()
