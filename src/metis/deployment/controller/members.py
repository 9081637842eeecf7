"""Who may join: the learners that the file names, with those that were added and removed since."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from metis.core.events import LearnerId


class Members:
    """Kept by the event loop; the changes are in the journal, so that they outlive a restart and win over the file."""

    def __init__(
        self, of_file: Collection[LearnerId] | None, changes: Mapping[LearnerId, bool], joined: Collection[LearnerId]
    ) -> None:
        self.of_file = None if of_file is None else tuple(of_file)  # None: everybody with a certificate
        self._changes = dict(changes)
        self._indices: dict[LearnerId, int] = {}
        for learner in (*(self.of_file or ()), *changes, *joined):
            self.index(learner)

    def __contains__(self, learner: LearnerId) -> bool:
        return self._changes.get(learner, self.of_file is None or learner in self.of_file)

    def changed(self, learner: LearnerId, added: bool) -> None:
        self._changes[learner] = added
        self.index(learner)

    def removed(self, learner: LearnerId) -> bool:
        return self._changes.get(learner) is False

    def index(self, learner: LearnerId) -> int:
        """Its number in the federation: those of the file in its order, then the others as they came; never reused."""
        return self._indices.setdefault(learner, len(self._indices))

    @property
    def known(self) -> list[LearnerId]:
        """Everybody that ever was a member, in order."""
        return list(self._indices)

    @property
    def names(self) -> list[LearnerId]:
        return [learner for learner in self._indices if learner in self]

    def stranger(self, learner: LearnerId) -> str:
        """The sentence for a name that was never a member."""
        return f"there is no member '{learner}'; the members are {', '.join(self.names) or 'none'}"
