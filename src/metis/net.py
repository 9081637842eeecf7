"""Addresses: HOST:PORT in both directions, sockets to listen on, and what counts as this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket

from metis.errors import ConfigError


def host_and_port(
    address: str, example: str = "127.0.0.1:9464 or [::1]:9464", *, listen: bool = False
) -> tuple[str, int]:
    """Split HOST:PORT, where HOST may be an IPv6 address in brackets; port 0 (any free port) is only for listening."""
    host, _, port = address.rpartition(":")
    valid_port = port.isascii() and port.isdigit() and (0 if listen else 1) <= int(port) < 65_536
    if not host or not valid_port or (":" in host and host[0] != "["):
        raise ConfigError(f"'{address}' is not a valid address; write HOST:PORT, as in {example}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its very name, so that nothing leaves it."""
    host = host.strip("[]").lower()
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def header_is_loopback(header: str) -> bool:
    """Whether the Host header of a request names this machine; a page elsewhere whose name leads here does not."""
    host, colon, port = header.rpartition(":")
    return is_loopback(host if colon and port.isdigit() else header)


def is_served_locally(bound: socket.socket) -> bool:
    """Whether a listening socket can be reached from this machine only."""
    return is_loopback(str(bound.getsockname()[0]))


def listen_on(address: str, purpose: str, *, or_any_port: bool = False) -> socket.socket:
    """A listening socket for a purpose, which errors name; with `or_any_port` another port if this one is taken."""
    host, port = host_and_port(address, listen=True)
    bound = None
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(resolved)
        except OSError as problem:
            if not or_any_port or problem.errno != errno.EADDRINUSE:
                raise
            bound.bind((host, 0))
        bound.listen(64)
    except OSError as problem:
        if bound is not None:
            bound.close()
        raise ConfigError(f"{purpose} cannot be served on {address}: {listening_problem(problem)}") from problem
    return bound


def listening_problem(problem: OSError, in_use: str = "port 0 takes a free one") -> str:
    """Why listening failed, and what helps."""
    causes = {
        errno.EADDRINUSE: f"the port is in use; {in_use}",
        errno.EACCES: "ports below 1024 are reserved for the administrator; choose a higher one",
        errno.EADDRNOTAVAIL: "this machine has no such address",
    }
    return causes.get(problem.errno or 0, problem.strerror or str(problem))
