"""A consortium for tests: a CA, kits as they come from it, and a real gRPC server with mTLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from metis.deployment.security.authority import Authority
from metis.deployment.security.identity import (
    Kit,
    Revocations,
    channel_credentials,
    load_kit,
    now_utc,
    peer_of,
    server_credentials,
)
from metis.errors import LearnerError

DAY = timedelta(days=1)
WHO = "/metis.test/Who"


class Consortium:
    """A CA that is two years old, and whatever it issues."""

    def __init__(self, folder: Path, name: str = "Ours") -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "ca", name, days=3650, now=now_utc() - 730 * DAY)

    def kit(
        self,
        name: str,
        role: str = "learner",
        hosts: Sequence[str] = (),
        days: int = 365,
        made: datetime | None = None,
        folder: str | None = None,
    ) -> Kit:
        """A kit that was made at a certain time."""
        kit = self.folder / (folder or name)
        self.authority.write_kit(kit, *self.authority.issue(name, role, hosts, days, now=made, again=True))
        return load_kit(kit)

    def controller(self, hosts: Sequence[str] = ("localhost", "127.0.0.1"), **options: Any) -> Kit:
        return self.kit("main", "controller", hosts, **options)


class _Who(grpc.GenericRpcHandler):
    """Answers who is calling, after looking at the revocations as a controller does at every call."""

    def __init__(self, revocations: Revocations | None) -> None:
        self._revocations = revocations

    def service(self, details: Any) -> Any:
        async def who(_: bytes, context: Any) -> bytes:
            try:
                peer = peer_of(context.auth_context())
            except LearnerError as problem:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(problem))
            if self._revocations is not None and (reason := self._revocations.reason(peer.serial)):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
            return f"{peer.role}/{peer.name}/{peer.serial:x}".encode()

        return grpc.unary_unary_rpc_method_handler(who)


@asynccontextmanager
async def serving(kit: Kit | None) -> AsyncIterator[int]:
    """A real server on loopback, with mTLS if there is a kit; gives its port."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Who(None if kit is None else Revocations(kit)),))
    if kit is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(kit))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def dial(port: int, kit: Kit) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials(kit))


async def who(channel: grpc.aio.Channel) -> str:
    """Whom the server takes us for."""
    answer: bytes = await channel.unary_unary(WHO)(b"", timeout=600)
    return answer.decode()
