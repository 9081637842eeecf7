"""Checks before a controller serves and before a learner dials: they find the real cause of a failure, in seconds.

gRPC calls every failed handshake "Socket closed", and its server closes without an alert. So the handshake is tried
first with Python's `ssl` and the same kit, and what goes wrong is reported in words.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from cryptography import x509

from metis.deployment.route import Route, resolve
from metis.deployment.security.identity import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    Kit,
    Revocations,
    check_kit,
    hosts_of,
    identity_of,
    moment,
    now_utc,
    out_of_date,
    signed_by,
    signers,
)
from metis.errors import ConfigError, Unreachable
from metis.net import is_loopback, join_address, listening_problem

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # HTTP/2, then empty settings


def serving_problem(kit: Kit | None, host: str, port: int | None = None) -> str | None:
    """What keeps a controller from serving at host and port, or None; without a kit it is plain text."""
    try:
        if kit is not None:
            check_kit(kit, "controller")
            Revocations(kit).reason(0)
        elif not is_loopback(host):
            return f"plain text is served on loopback only (127.0.0.1, ::1, localhost), not on {host}; give --identity"
        for family, kind, protocol, _, address in resolve(host.strip("[]"), port or 0, time.monotonic() + 5):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except ConfigError as problem:
        return str(problem)
    except OSError as problem:
        cause = listening_problem(problem, "is a controller running already?")
        return f"cannot listen on {join_address(host.strip('[]'), port or 0)}: {cause}"
    return None


# These do not come from gRPC's server, which closes silently, but from a proxy in front of it that terminates TLS.
_ALERTS = {
    "CERTIFICATE_EXPIRED": "as expired; is its clock right?",
    "CERTIFICATE_REVOKED": "as revoked",
    "UNKNOWN_CA": "as signed by a CA that it does not know",
    "BAD_CERTIFICATE": "as bad, perhaps as not valid yet; is its clock right?",
    "UNSUPPORTED_CERTIFICATE": "as made for another purpose",
    "CERTIFICATE_UNKNOWN": "without giving a reason",
    "CERTIFICATE_REQUIRED": "because it did not get one",
}


def preflight(route: Route, kit: Kit | None, timeout: float = 5.0) -> None:
    """Find out within `timeout` seconds why a controller cannot be dialled; without a kit it is dialled in plain text.

    Raises Unreachable if it is worth trying again, another ConfigError if it is not.
    """
    deadline, where = time.monotonic() + timeout, route.where
    if kit is None:
        answer = _greet(route, None, deadline)
        if not answer and _shown_certificate(route, deadline):
            raise ConfigError(f"the controller at {where} requires TLS: give --identity instead of --insecure")
        if not answer:
            raise Unreachable(f"{where} closes the connection; is the controller starting or stopping?")
        _check_answer(answer, where)
        return
    check_kit(kit)
    context = _tls(kit)
    try:
        answer = _greet(route, context, deadline)
        if not answer:  # a controller that is killed closes too, but does not answer a second time
            time.sleep(0.2)
            answer = _greet(route, context, deadline)
    except ssl.SSLCertVerificationError as problem:
        raise ConfigError(_distrust(route, kit, problem, deadline)) from None
    except (ssl.SSLError, ConnectionError) as problem:
        raise _no_handshake(route, problem, deadline) from None
    if not answer:
        raise ConfigError(
            f"the controller at {where} refuses our certificate without giving a reason ({kit}, {kit.serial:x}, valid "
            f"from {moment(kit.not_before)} to {moment(kit.not_after)}; our clock says {moment(now_utc())}): its "
            f"{AUTHORITY} is not ours, or its clock is off; metis doctor at both ends shows which"
        )
    _check_answer(answer, where)


def _check_answer(answer: bytes, where: str) -> None:
    if answer[3:4] != b"\x04":  # the settings that an HTTP/2 server begins with
        raise ConfigError(
            f"what answers at {where} is not a Metis controller (it sends {answer[:24]!r}); is the port right?"
        )


def _distrust(route: Route, kit: Kit, problem: ssl.SSLError, deadline: float) -> str:
    """Why OpenSSL did not accept the controller's certificate, in words and dates."""
    host, where = route.host, route.where
    shown = _shown_certificate(route, deadline)
    if shown is None:
        return f"the certificate at {where} is not accepted: {getattr(problem, 'verify_message', problem)}"
    if not signed_by(shown, kit.authority):
        return (
            f"the certificate at {where} is not signed by our CA: {signers(shown, kit.authority)}; this is the "
            "controller of another federation, or a proxy that terminates TLS, or our kit is out of date"
        )
    if words := out_of_date(shown, now_utc()):
        return f"the controller's certificate at {where} {words}; notify the operator of the controller"
    role, name = identity_of(shown, f"the certificate at {where}")
    if role != "controller":
        return f"what answers at {where} is {role} '{name}', not a controller"
    if host not in hosts_of(shown):
        return (
            f"the controller's certificate at {where} is not for {host} but for {', '.join(hosts_of(shown))}; dial one "
            f"of these, or have it issued again with --host {host}"
        )
    return f"the controller's certificate at {where} is not accepted: {getattr(problem, 'verify_message', problem)}"


def _no_handshake(route: Route, problem: OSError, deadline: float) -> ConfigError:
    """Why the TLS handshake failed."""
    where, reason = route.where, str(getattr(problem, "reason", None) or problem)
    for alert, words in _ALERTS.items():
        if reason.endswith(alert):
            return ConfigError(f"the controller at {where} refuses our certificate {words}")
    try:
        answer = _greet(route, None, deadline)
    except ConfigError:
        answer = b""
    if answer[3:4] == b"\x04":
        return ConfigError(
            f"the controller at {where} speaks plain text (--insecure), but we speak TLS; start both in the same way"
        )
    if answer:
        return ConfigError(f"what answers at {where} does not speak TLS (it sends {answer[:24]!r}); is the port right?")
    return Unreachable(f"{where} breaks off the TLS handshake ({reason}); is the controller starting or stopping?")


def _tls(kit: Kit | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if kit is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(kit.folder / AUTHORITY)
        context.load_cert_chain(kit.folder / CERTIFICATE, kit.folder / KEY)
    return context


def _shown_certificate(route: Route, deadline: float) -> x509.Certificate | None:
    """The certificate that a server presents, trusted or not; only used in messages."""
    try:
        with route.connect(deadline) as plain, _tls(None).wrap_socket(plain, server_hostname=route.host) as secure:
            return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError, ConfigError):
        return None


def _greet(route: Route, context: ssl.SSLContext | None, deadline: float) -> bytes:
    """Open HTTP/2 and return the first bytes of the answer, empty if the other side closed.

    With TLS 1.3 our handshake ends before the server has looked at our certificate: only reading shows a refusal.
    gRPC's server speaks first, and listening before we speak keeps a reset from overtaking what it sent.
    """
    connection = route.connect(deadline)
    try:
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname=route.host)
        try:
            connection.settimeout(min(1.0, _left(deadline) / 2))
            with contextlib.suppress(TimeoutError):
                return connection.recv(64)
            connection.settimeout(_left(deadline))
            connection.sendall(_PREFACE)
            return connection.recv(64)
        except (ConnectionError, ssl.SSLEOFError):
            return b""
    except TimeoutError:
        raise Unreachable(
            f"{route.where} accepts the connection and then sends nothing; is the controller overloaded or stopped?"
        ) from None
    finally:
        connection.close()


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())
