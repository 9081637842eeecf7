"""An administrator's end of the wire: commands to a controller, and what can be read from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from metis.core.model import Layout
from metis.deployment.preflight import preflight
from metis.deployment.route import route_to
from metis.deployment.security.identity import Kit, channel_credentials, check_kit, load_kit
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import read_model
from metis.deployment.wire.protocol import ADMINISTRATION, CHANNEL_OPTIONS, PROTOCOL
from metis.errors import ConfigError, Unreachable
from metis.files import replacing
from metis.net import host_and_port, is_loopback
from metis.runs.storage import save_model
from metis.text import printable

Document = dict[str, Any]
Metadata = tuple[tuple[str, str], ...]

BY_NAME: Metadata = (("metis-role", "admin"),)  # instead of a certificate

_COMMAND_SECONDS = 120.0  # a controller may be busy mixing
_ROLES = ("admin", "viewer")


class StartedAgain(Exception):
    """The controller is another process than before: what was read of its trace is void."""


class RemoteController:
    """A controller somewhere else."""

    def __init__(self, address: str, channel: grpc.Channel, metadata: Metadata = ()) -> None:
        self.address, self._channel, self._metadata = address, channel, metadata
        self._command = channel.unary_unary(
            f"/{ADMINISTRATION}/Command", pb.AdminRequest.SerializeToString, pb.AdminAnswer.FromString
        )
        self._read = channel.unary_stream(
            f"/{ADMINISTRATION}/Read", pb.AdminRequest.SerializeToString, pb.Chunk.FromString
        )

    @classmethod
    def dial(cls, address: str, identity: Path | None, proxy: str | None = None) -> RemoteController:
        """With the certificate of a kit; without one in plain text, on this machine only."""
        host, port = host_and_port(address, "federation.example.org:7443")
        kit: Kit | None = None
        if identity is not None:
            kit = load_kit(identity)
            check_kit(kit)
            if kit.role not in _ROLES:
                raise ConfigError(f"{identity} belongs to {kit}; give the kit of an admin or a viewer")
        elif not is_loopback(host):
            raise ConfigError(f"--insecure works on one machine only, and {host} is another one; give --identity KIT")
        route = route_to(host, port, proxy)
        preflight(route, kit)
        target, options = route.channel()
        if kit is None:
            return cls(address, grpc.insecure_channel(target, [*CHANNEL_OPTIONS, *options]), BY_NAME)
        return cls(address, grpc.secure_channel(target, channel_credentials(kit), [*CHANNEL_OPTIONS, *options]))

    def __enter__(self) -> RemoteController:
        return self

    def __exit__(self, *reason: object) -> None:
        self._channel.close()

    def command(self, name: str, **arguments: Any) -> Document:
        """The controller's answer; what it refuses is a ConfigError with its sentence."""
        try:
            answer = self._command(_request(name, arguments), timeout=_COMMAND_SECONDS, metadata=self._metadata)
        except grpc.RpcError as problem:
            raise self._explained(problem) from None
        document = json.loads(answer.document)
        if not isinstance(document, dict):
            raise ConfigError(f"the controller at {self.address} gave an answer that is not understood")
        return document

    def read(self, name: str, **arguments: Any) -> Iterator[bytes]:
        """The bytes of something that the controller has, piece by piece."""
        try:
            for piece in self._read(_request(name, arguments), metadata=self._metadata):
                yield piece.data
        except grpc.RpcError as problem:
            if problem.code() == grpc.StatusCode.FAILED_PRECONDITION and "start" in arguments:
                raise StartedAgain from None
            raise self._explained(problem) from None

    def save_model(self, path: Path, version: int | None, best: bool) -> Document:
        """Fetch a community model and write it as a safetensors file; it is whole, or there is none."""
        about = self.command("model", version=version, best=best)
        digest, offset = hashlib.sha256(), 0
        layout = Layout.from_json(about["layout"])
        with replacing(path.with_name(f"{path.name}.part")) as raw:
            with raw.open("wb") as file:
                while offset < about["bytes"]:
                    before = offset
                    for data in self.read("model", version=about["version"], offset=offset):
                        digest.update(data)
                        offset += file.write(data)
                    if offset == before:
                        break
            if digest.hexdigest() != about["sha256"]:
                raise ConfigError(f"the model of {self.address} did not arrive as it was sent; try again")
            save_model(path, read_model(raw, layout), {"version": str(about["version"])})
        path.with_name(f"{path.name}.part").unlink()
        return {key: about[key] for key in ("version", "sha256", "bytes")}

    def _explained(self, problem: Any) -> ConfigError:
        text = printable(problem.details() or "")
        if problem.code() == grpc.StatusCode.UNIMPLEMENTED and "not a command" not in text:
            return ConfigError(f"the controller at {self.address} cannot be administered remotely")
        if problem.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return Unreachable(f"the controller at {self.address} does not answer: {text}")
        return ConfigError(f"the controller at {self.address}: {text}")


def _request(name: str, arguments: Document) -> pb.AdminRequest:
    given = {key: value for key, value in arguments.items() if value is not None}
    return pb.AdminRequest(protocol=PROTOCOL, command=name, arguments=json.dumps(given))
