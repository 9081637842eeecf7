"""Every error that Metis raises on purpose, and whose fault it is.

MetisError
├── ConfigError            the user's: a file, a key, an argument; nothing has started yet
│   ├── ArgumentError      an argument from Python with an impossible value; also a ValueError
│   ├── DataError          a data set that is missing, damaged or cannot be divided as asked
│   ├── DefinitionError    a policy, solver, layer or engine whose code does not keep its contract
│   ├── LockHeld           a file or folder that another process uses
│   ├── StateError         a controller's state folder that cannot be used
│   └── Unreachable        a controller that does not answer now, but may later
├── DiskFull               the disk's: nothing has changed, and the same call works when there is space again
├── LearnerError           a learner's: the federation goes on without its update
│   ├── DuplicateUpdate    a task that was answered already
│   ├── Refused            a message of the secure sum that breaks its rules; nothing has changed
│   ├── UnexpectedEvent    an event that cannot happen now, such as an answer to no open task; it changed nothing
│   ├── Diverged           local training left the finite numbers
│   │   └── NotFinite      because its examples have NaN or infinity
│   ├── ChildFailed        a site's code or data failed in the training process
│   ├── ChildDied          the training process is gone; another one can be started
│   └── Abandoned          a training that was not wanted any more
└── InternalError          ours: please report it
"""

import sysconfig
import traceback
from pathlib import Path
from typing import Any

_LONGEST = 600  # torch appends pages of advice to some of its messages


class MetisError(Exception):
    """One clear sentence: what was wrong, where, and what is allowed."""


class ConfigError(MetisError):
    """The user asked for something that cannot be."""


class ArgumentError(ConfigError, ValueError):
    """An argument has an impossible value."""

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument  # its name, for a file's checks to say where it stands


class DataError(ConfigError):
    """A data set is missing, damaged, or cannot be divided as asked."""


class DefinitionError(ConfigError):
    """A policy, solver, layer or engine, perhaps of another package, does not keep its contract."""


class LockHeld(ConfigError):
    """Another process holds the lock."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by another process{f' ({holder})' if holder else ''}")
        self.holder = holder  # "process id 123 on HOST", or empty if it left no note


class StateError(ConfigError):
    """A state folder cannot be used: another controller uses it, another version made it, or it is damaged."""


class Unreachable(ConfigError):
    """The controller does not answer now, but may later: every problem except those of certificates."""

    def __init__(self, message: str, *, unknown_name: bool = False) -> None:
        super().__init__(message)
        self.unknown_name = unknown_name  # a typing error, or a network that is down


class DiskFull(MetisError):
    """The disk is full; nothing has changed, and the same call works when there is space again."""


class LearnerError(MetisError):
    """A learner did something that the federation survives."""


class DuplicateUpdate(LearnerError):
    """A task was answered already, by the journal's entry that this carries."""

    def __init__(self, entry: Any) -> None:
        super().__init__(f"task {entry.update} was already answered by entry {entry.seq} of the journal")
        self.entry = entry


class Refused(LearnerError):
    """A message of the secure sum breaks its rules, or the member that should act on it must not; nothing changed."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule  # of the site's own policy that says so, if one does


class UnexpectedEvent(LearnerError):
    """An event that cannot happen now; the controller's state is unchanged."""


class Diverged(LearnerError):
    """Local training produced numbers that are not finite."""


class NotFinite(Diverged):
    """Examples contain numbers that are not finite."""


class ClientFailed(Diverged):
    """A client of another system could not train, or returned something that cannot be mixed."""


class ChildFailed(LearnerError):
    """The site's code or data failed in the training process, which is alive."""

    def __init__(
        self, reason: str, steps: int = 0, seconds: float = 0.0, kind: str = "unknown", details: str = ""
    ) -> None:
        super().__init__(reason)
        self.steps, self.seconds = steps, seconds
        self.kind, self.details = kind, details  # what the controller hears, and the traceback, which stays here


class ChildDied(LearnerError):
    """The training process is gone; another one can be started."""


class Abandoned(LearnerError):
    """The training was abandoned, as asked."""


class InternalError(MetisError):
    """A bug in Metis."""


def needs_package(what: str, package: str | None, extra: str) -> str:
    """The message where a package is missing that an extra of Metis installs, with the command that installs it."""
    return f"{what} needs the package {package}; in your clone of Metis run: pip install '.[{extra}]'"


def described(problem: BaseException) -> str:
    """One sentence for an exception that came out of a user's file: FILE:LINE, its kind and its message."""
    if isinstance(problem, MetisError):
        return str(problem)
    kind, text = type(problem).__name__, " ".join(str(problem).split())
    where = ""
    if isinstance(problem, SyntaxError) and problem.filename:
        text = problem.msg
        where = f"{Path(problem.filename).name}:{problem.lineno}: "
    else:
        frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if _of_the_user(frame.filename)]
        if frames:
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: "
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " ..."
    return f"{where}{kind}: {text}" if text else f"{where}{kind}"


def _of_the_user(file: str) -> bool:
    """Whether a line of this file was written by the user, not by Metis, Python or a library."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):  # also of an environment that this one builds on
        return False
    libraries = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(path.is_relative_to(folder) for folder in (Path(__file__).resolve().parent, *libraries))
