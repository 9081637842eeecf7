"""The status of a controller for those who ask: over HTTP while it runs, from its journal while it does not."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.errors import ConfigError
from metis.net import host_and_port

if TYPE_CHECKING:
    from metis.deployment.controller.state import State

Document = dict[str, Any]

_MAX_ANSWER = 1 << 28  # bytes
_MIN_TOKEN = 16


class Unanswered(Exception):
    """The status could not be obtained; one sentence says why."""


def read_token(path: Path) -> str:
    """The token in a file, which is its only line."""
    try:
        return check_token(path.read_text("utf-8").strip(), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not a text file"
        raise ConfigError(f"the token file {path} cannot be read: {reason}") from problem


def check_token(token: str, where: str) -> str:
    if len(token) < _MIN_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"the token in {where} must have at least {_MIN_TOKEN} letters, digits and signs without spaces; make one "
            "with: openssl rand -hex 32"
        )
    return token


def fetch(address: str, token: str | None = None, seconds: float = 8.0) -> Document:
    """The document of the controller whose status is served there; `Unanswered` says why there is none."""
    host, port = host_and_port(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # an address that listens everywhere
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", "/status", headers={} if token is None else {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        body = response.read(_MAX_ANSWER)
        text = body[:300].decode("utf-8", "replace").strip()
        if response.status in (401, 403):
            raise ConfigError(f"{address} does not give its status: {text}")
        if response.status == 503:
            raise Unanswered(text)
        document = json.loads(body)
        if response.status != 200 or not isinstance(document, dict) or "learners" not in document:
            raise ValueError
        return document
    except ConnectionRefusedError:
        raise Unanswered(f"nothing listens on {address}") from None
    except OSError as problem:
        raise Unanswered(f"{address}: {problem.strerror or problem}") from problem
    except (ValueError, http.client.HTTPException):
        raise ConfigError(f"{address} is not the status address of a controller") from None
    finally:
        connection.close()


@contextlib.contextmanager
def copied_state(folder: Path) -> Iterator[State]:
    """A copy of a state folder's journal to read, whether a controller runs or not; the folder is not touched.

    SQLite would create files next to a journal that it only reads, and would keep a controller from starting.
    """
    from metis.deployment.controller.state import State
    from metis.errors import StateError

    with tempfile.TemporaryDirectory(prefix="metis-status-") as temporary:
        copy = Path(temporary)
        for name in ("controller.db", "controller.db-wal", "ACKNOWLEDGED"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(folder / name, copy / name)
        try:
            with State.open(copy, "process") as state:
                yield state
        except StateError as problem:
            raise ConfigError(str(problem).replace(temporary, str(folder))) from problem


def recall(folder: Path) -> Document:
    """The status document as far as the journal knows it, while no controller runs."""
    with copied_state(folder) as state:
        document = _recalled(state.facts() or {}, (entry.record for entry in state.entries()))
        run, start = state.run, state.epoch - 1
    reason = _finish_reason(folder / "run" / "summary.json")
    state_now = "not running" if reason is None else "finished"
    return {"run": run, "state": state_now, "finish_reason": reason, "start": start, **document}


def _recalled(facts: Document, records: Iterator[Document]) -> Document:
    experiment = facts.get("experiment", {})
    policy = (experiment.get("policy") or [{}])[0]
    metric, best = facts.get("metric"), None
    document: Document = {
        "policy": policy.get("label") or policy.get("name"),
        "version": 0,
        "update_requests": 0,
        "seconds": 0.0,
        "metric": metric,
        "target": experiment.get("evaluation", {}).get("target"),
        "latest": None,
        "best": None,
    }
    present: dict[str, bool] = {}
    for record in records:
        document["seconds"] = max(document["seconds"], record["at"])
        if "published" in record:
            document["version"] = record["published"]
        match record.get("event"):
            case "update_request":
                document["update_requests"] += 1
            case "learner_joined":
                present[record["learner"]] = True
            case "learner_left" | "learner_withdrawn" | "member_removed":
                present[record["learner"]] = False
            case "evaluated":
                point = {"version": record["version"], "at": record["at"], **record["metrics"]}
                document["latest"], value = point, record["metrics"].get(metric)
                sign = 1 if facts.get("higher_is_better", True) else -1
                if value is not None and math.isfinite(value) and (best is None or sign * value > sign * best):
                    best, document["best"] = value, point
    document["learners"] = [{"name": name, "present": here} for name, here in present.items()]
    return document


def _finish_reason(summary: Path) -> str | None:
    try:
        return str(json.loads(summary.read_text("utf-8"))["finish_reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
