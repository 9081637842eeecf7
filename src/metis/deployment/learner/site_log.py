"""`failures.log` in the work folder, for the site's operator only: what went wrong here, in full, by reference.

The controller gets the kind and the reference, nothing else: exceptions quote records, file names and patients.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from metis.deployment.learner.supervisor import Report
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import cause, reference
from metis.errors import ChildFailed
from metis.system import disk, unix_time

LOG = "failures.log"
_LARGEST = 4 << 20  # bytes; then it begins again, and the one before is kept as failures.log.1


class SiteLog:
    """Keeps the texts of failures; what it returns may travel."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._path, self._report = folder / LOG, report

    def failed(
        self,
        kind: pb.Cause.Kind,
        text: str,
        details: str = "",
        rule: pb.Cause.Rule = pb.Cause.NO_RULE,
    ) -> pb.Cause:
        """Report a failure on this site's terminal and keep it."""
        made = self.keep(kind, text, details, rule)
        self._report("failed", f"{text} (reference {reference(made)})")
        return made

    def keep(
        self,
        kind: pb.Cause.Kind,
        text: str,
        details: str = "",
        rule: pb.Cause.Rule = pb.Cause.NO_RULE,
    ) -> pb.Cause:
        """Write a failure to the log under a new reference."""
        made = cause(kind, rule)
        lines = (text, *details.splitlines())
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time()))
        head = f"{now} {reference(made)} {pb.Cause.Kind.Name(kind).lower()}"
        with contextlib.suppress(OSError):  # a full disk; the terminal has the sentence
            self._append(head + "".join(f"\n    {line}" for line in lines) + "\n")
        return made

    def _append(self, entry: str) -> None:
        if self._path.exists() and self._path.stat().st_size > _LARGEST:
            self._path.replace(self._path.with_name(f"{LOG}.1"))
        descriptor = disk().open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with disk().file(descriptor, "ab") as log:
            log.write(entry.encode("utf-8", "backslashreplace"))


def kind_of(problem: ChildFailed) -> pb.Cause.Kind:
    """The kind of a failure in the training process, as it travels."""
    kinds: Any = dict(pb.Cause.Kind.items())
    known: pb.Cause.Kind = kinds.get(problem.kind.upper(), pb.Cause.UNKNOWN)
    return known
