"""Run a command under the system call filter of a systemd unit, without a running systemd.

    python restricted.py UNIT COMMAND...

The sets of calls are those of `systemd-analyze syscall-filter`; libseccomp makes the filter, as systemd does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def calls_of(name: str) -> set[str]:
    """A system call, or all of a set."""
    if not name.startswith("@"):
        return {name}
    lines = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    words = [line.strip() for line in lines[1:]]
    return set().union(*(calls_of(word) for word in words if word and not word.startswith("#")))


def allowed_by(unit: Path) -> set[str]:
    """What the lines SystemCallFilter= of a unit leave."""
    allowed: set[str] = set()
    for line in unit.read_text().splitlines():
        if line.startswith("SystemCallFilter="):
            words = line.partition("=")[2].removeprefix("~").split()
            calls = set().union(*map(calls_of, words))
            allowed = allowed - calls if "=~" in line else allowed | calls
    return allowed | calls_of("@default")


def restrict(allowed: set[str]) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    filter_ = library.seccomp_init(_ERRNO | errno.EPERM)
    for call in allowed:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:
            library.seccomp_rule_add(filter_, _ALLOW, number, 0)
    if ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) or library.seccomp_load(filter_):  # PR_SET_NO_NEW_PRIVS
        raise SystemExit("the filter cannot be loaded")


if __name__ == "__main__":
    restrict(allowed_by(Path(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
