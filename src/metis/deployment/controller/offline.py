"""Members of a federation whose controller does not run: the same events, put into its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from metis.core.events import MemberRemoved
from metis.deployment.controller.administration import member_added
from metis.deployment.controller.audit import AUDIT, AuditLog
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.members import Members
from metis.deployment.controller.state import State
from metis.deployment.controller.status import copied_state
from metis.deployment.security.identity import check_name
from metis.errors import ConfigError
from metis.runs.trace import to_record


def members_of(folder: Path) -> dict[str, Any]:
    """The members, also while a controller runs; the folder is not touched."""
    with copied_state(folder) as state:
        members = _members(state.facts(), state.entries(), folder)[0]
    of_file = members.of_file or ()
    return {
        "members": [{"name": name, "added": name not in of_file} for name in members.names],
        "removed": [name for name in members.known if members.removed(name)],
    }


def change_member(folder: Path, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add or remove a member; the next controller on this folder begins with it."""
    learner = check_name(str(arguments["learner"]))
    if not (folder / "controller.db").is_file():
        raise ConfigError(f"{folder} is not the state folder of a controller: it has no controller.db")
    with State.open(folder) as state:
        members, at = _members(facts := state.facts(), state.entries(), folder)
        if command == "remove" and learner not in members.known:
            raise ConfigError(members.stranger(learner))
        if (command == "add") == (learner in members):
            return {"text": f"'{learner}' is {'a member already' if command == 'add' else 'not a member'}"}
        if command == "add":
            if learner not in (members.of_file or ()) and (facts or {})["experiment"].get("site") is None:
                raise ConfigError(
                    "this federation divides a built-in data set among the learners of its file, so no other can be "
                    "added"
                )
            event = to_record(at, member_added(learner, arguments))
        else:
            event = to_record(at, MemberRemoved(learner, arguments.get("withdraw") is True))
        state.append(at, event)
        audit = AuditLog(folder / AUDIT)
        audit.note(event["event"], learner=learner, who="local", text="in the folder of a stopped controller")
        audit.close()
    return {"text": f"'{learner}' was {'added' if command == 'add' else 'removed'}; the next start counts it"}


def _members(facts: Mapping[str, Any] | None, entries: Iterable[Entry], folder: Path) -> tuple[Members, float]:
    """Who is a member, and when the latest event was."""
    if facts is None:
        raise ConfigError(f"the run in {folder} has not begun; its members are those of its file")
    of_file = [
        name
        for group in facts["experiment"]["learners"]
        for name in group.get("names") or [f"{group['name']}-{number + 1}" for number in range(group.get("count", 1))]
    ]
    members, at = Members(of_file, {}, ()), 0.0
    for entry in entries:
        at = max(at, entry.at)
        if entry.record.get("event") in ("member_added", "member_removed"):
            members.changed(entry.record["learner"], entry.record["event"] == "member_added")
    return members, at
