"""The way to a controller: directly, or through the HTTP proxy of a site, for every command that dials one.

gRPC would read the environment by itself, but in its own way and without a word about what went wrong. So the way is
decided here, once: for the trial connections of the preflight and for gRPC's channels.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from metis.errors import ConfigError, Unreachable
from metis.net import is_loopback, join_address
from metis.system import monotonic

_VARIABLES = ("grpc_proxy", "https_proxy", "HTTPS_PROXY", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
_FORM = "write http://HOST:PORT or http://USER:PASSWORD@HOST:PORT"
_MAX_HEAD = 1 << 16


@dataclass(frozen=True)
class HttpProxy:
    """An HTTP proxy that opens tunnels by CONNECT."""

    host: str
    port: int
    credentials: str | None = field(repr=False)  # USER:PASSWORD
    origin: str  # where its address is from

    def __str__(self) -> str:
        return f"the proxy {join_address(self.host, self.port)} (from {self.origin})"

    @staticmethod
    def parse(url: str, origin: str) -> HttpProxy:
        """A URL as in the environment; in errors its user and password are left out."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            raise ConfigError(f"{origin} is not the address of a proxy; {_FORM}") from None
        if parts.scheme != "http":
            raise ConfigError(f"{origin} begins with {parts.scheme}://, but the proxy must speak plain HTTP; {_FORM}")
        if not host:
            raise ConfigError(f"{origin} does not name a host; {_FORM}")
        user = None if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return HttpProxy(host, port, user, origin)

    @property
    def header(self) -> str:
        """The authorization, or nothing."""
        if self.credentials is None:
            return ""
        return f"Proxy-Authorization:Basic {base64.b64encode(self.credentials.encode()).decode()}"

    def tunnel(self, connection: socket.socket, where: str, deadline: float) -> None:
        """Have the proxy connect us to `where`, whose name only the proxy need know."""
        lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}", *([self.header] if self.header else []), "", ""]
        head = b""
        try:
            connection.sendall("\r\n".join(lines).encode())
            while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD:
                connection.settimeout(_left(deadline))
                piece = connection.recv(1)  # not more: what follows belongs to the other end
                if not piece:
                    break
                head += piece
        except TimeoutError:
            raise Unreachable(f"{self} does not answer when it is asked for {where}") from None
        except OSError:
            pass  # what came before the reset is the answer
        status = head.split(b"\r\n")[0].decode("latin-1")
        code = status.split(" ")[1] if status.startswith("HTTP/1.") and " " in status else ""
        if code != "200":
            raise self._refusal(code, " ".join(status.split(" ")[1:])[:80], where, head)

    def _refusal(self, code: str, words: str, where: str, head: bytes) -> ConfigError:
        if code == "407" and self.credentials is None:
            return ConfigError(f"{self} requires a user and a password; {_FORM}")
        if code == "407":
            return Unreachable(f"{self} does not accept the user and the password of {self.origin} ({words})")
        if code in ("401", "403", "405"):
            return Unreachable(f"{self} does not allow connections to {where} ({words}); have its operator allow it")
        if code:
            return Unreachable(
                f"{self} cannot reach {where} ({words}); is the name right, and is the controller running?"
            )  # fmt: skip
        if not head:
            return Unreachable(f"{self} closes the connection when it is asked for {where}; is it an HTTP proxy?")
        return ConfigError(f"what answers at {self} is not an HTTP proxy (it sends {head[:24]!r}); is the port right?")


@dataclass(frozen=True)
class Route:
    """A controller's address and the proxy in front of it, if there is one."""

    host: str
    port: int
    proxy: HttpProxy | None = None

    @property
    def where(self) -> str:
        """HOST:PORT of the controller."""
        return join_address(self.host, self.port)

    def connect(self, deadline: float) -> socket.socket:
        """A connection to the controller; what fails is explained in one sentence, by `Unreachable` if it may pass."""
        if self.proxy is None:
            return _connect(self.host, self.port, deadline, self.where, "the controller")
        connection = _connect(self.proxy.host, self.proxy.port, deadline, str(self.proxy), "it")
        try:
            self.proxy.tunnel(connection, self.where, deadline)
            connection.settimeout(_left(deadline))
        except BaseException:
            connection.close()
            raise
        return connection

    def channel(self) -> tuple[str, list[tuple[str, Any]]]:
        """What gRPC has to dial, and the options with which it comes out at the controller."""
        direct = ("grpc.enable_http_proxy", 0)  # it would read the environment itself
        if self.proxy is None:
            return self.where, [direct]
        options: list[tuple[str, Any]] = [direct, ("grpc.http_connect_server", self.where)]
        if self.proxy.header:
            options.append(("grpc.http_connect_headers", self.proxy.header))
        # The name in the controller's certificate is that of the controller, not of the proxy.
        return join_address(self.proxy.host, self.proxy.port), [*options, ("grpc.default_authority", self.where)]


def route_to(
    host: str, port: int, option: str | None = None, environment: Mapping[str, str] | None = None
) -> Route:  # fmt: skip
    """The way to a controller: by the option --proxy (a URL, or none), or else as the environment says."""
    host, environment = host.strip("[]"), os.environ if environment is None else environment
    if option is not None:
        return Route(host, port, None if option == "none" else HttpProxy.parse(option, "--proxy"))
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None or is_loopback(host):  # no proxy leads back to this machine
        return Route(host, port)
    excepted = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(_matches(entry.strip().lower(), host.lower(), port) for entry in excepted.split(",")):
        return Route(host, port)
    return Route(host, port, HttpProxy.parse(environment[name], name))


def _matches(entry: str, host: str, port: int) -> bool:
    """Whether an entry of no_proxy is this host: itself, a domain that it is in, a network, or * for all."""
    name, _, digits = entry.rpartition(":")
    if name and digits == str(port) and name.count(":") == 0:
        entry = name
    if entry == "*":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    entry = entry.removeprefix("*").removeprefix(".")
    return bool(entry) and (host == entry or host.endswith(f".{entry}"))


# --- connections --------------------------------------------------------------------------------


def _connect(host: str, port: int, deadline: float, what: str, who: str) -> socket.socket:
    problems: list[OSError] = []
    found = resolve(host, port, deadline)
    for left, (family, kind, protocol, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(_left(deadline) / left)
        try:
            connection.connect(address)
        except OSError as problem:
            connection.close()
            problems.append(problem)
        else:
            connection.settimeout(_left(deadline))
            return connection
    if any(isinstance(problem, ConnectionRefusedError) for problem in problems):
        raise Unreachable(f"nothing listens at {what}; is {who} running, and is the port right?")
    if any(isinstance(problem, TimeoutError) for problem in problems):
        raise Unreachable(f"{what} does not answer; is there a firewall in between, or is the machine off?")
    raise Unreachable(f"{what} cannot be reached: {problems[-1].strerror or problems[-1]}")


def resolve(host: str, port: int, deadline: float) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """The addresses of a name; a name service that hangs does not block us."""
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as problem:
            answers.put(problem)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_left(deadline))
    except queue.Empty:
        raise Unreachable(f"the name service does not answer for {host}; is the network up?") from None
    if isinstance(answer, UnicodeError):
        raise ConfigError(f"'{host}' is not a valid host name")
    if isinstance(answer, OSError):
        raise Unreachable(
            f"the host name {host} is unknown ({answer.strerror}); is it spelled right, and is the network up?",
            unknown_name=True,
        )
    return answer  # type: ignore[return-value]


def _left(deadline: float) -> float:
    return max(0.05, deadline - monotonic())
