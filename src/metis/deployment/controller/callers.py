"""Who is calling: by certificate, or by name on loopback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import grpc

from metis.deployment.controller.session import Context, Refused
from metis.deployment.security.identity import Peer, Revocations, check_name, moment, now_utc, peer_of
from metis.errors import ConfigError, LearnerError


def identify_by_name(context: Context) -> str:
    """Without certificates, on loopback only: the learner is who it says it is."""
    name = dict(context.invocation_metadata() or ()).get("metis-learner")
    try:
        return check_name(str(name or ""))
    except ConfigError as problem:
        reason = f"without certificates a learner must say its name, --name NAME: {problem}"
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, reason) from problem


def identify_by_certificate(
    revocations: Revocations, ends: dict[str, datetime] | None = None
) -> Callable[[Context], str]:
    """The learner is who its certificate says; asked at every call, so that a revocation works at once.

    `ends` is kept up to date with when each learner's certificate ends.
    """

    def identify(context: Context) -> str:
        peer = _peer(context, revocations)
        if peer.role != "learner":
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the certificate of '{peer.name}' is that of a {peer.role}, not of a learner",
            )
        if ends is not None:
            ends[peer.name] = peer.not_after
        return peer.name

    return identify


def _peer(context: Context, revocations: Revocations) -> Peer:
    """Whose certificate the caller has shown; one that is revoked or has expired is refused."""
    try:
        peer = peer_of(context.auth_context())
    except LearnerError as problem:
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, str(problem)) from problem
    try:
        reason = revocations.reason(peer.serial)
    except ConfigError as problem:  # our list is not in order: the caller did nothing wrong and may try again
        raise Refused(grpc.StatusCode.UNAVAILABLE, "the controller cannot read its list of revocations") from problem
    if reason is not None:
        raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
    if peer.not_after <= now_utc():  # an open connection outlives its certificate
        raise Refused(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the certificate of '{peer.name}' expired on {moment(peer.not_after)}; renew it",
        )
    return peer


# --- administrators ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Administrator:
    """Who asks for the status or gives a command."""

    role: str  # admin or viewer
    name: str
    serial: str = ""

    def __str__(self) -> str:
        return f"{self.role} '{self.name}'"


Administrators = Callable[[Context], Administrator]


def administrator_by_certificate(revocations: Revocations) -> Administrators:
    """By the role in the certificate; a learner's opens nothing here."""

    def identify(context: Context) -> Administrator:
        peer = _peer(context, revocations)
        if peer.role not in ("admin", "viewer"):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the certificate of '{peer.name}' is that of a {peer.role}; administration needs one of the role "
                "admin or viewer",
            )
        return Administrator(peer.role, peer.name, f"{peer.serial:x}")

    return identify


def administrator_by_name(context: Context) -> Administrator:
    """Without certificates, on loopback only: the role that the caller says it has."""
    said = dict(context.invocation_metadata() or ())
    if said.get("metis-role") not in ("admin", "viewer"):
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, "without certificates the caller must say its role")
    return Administrator(str(said["metis-role"]), "local")


def serial_of(context: Context) -> str:
    """Of the certificate that the caller has shown; empty without one."""
    try:
        return f"{peer_of(context.auth_context()).serial:x}"
    except LearnerError:
        return ""
