"""The experiment that is being written, and the remarks on keys that were not copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NoteKind = Literal["lost", "changed", "assumed", "idle"]
TITLES: dict[NoteKind, str] = {
    "lost": "not translated",
    "changed": "translated with a difference",
    "assumed": "assumed, because the source does not say it",
    "idle": "without effect in roll",
}


@dataclass(frozen=True)
class Note:
    """A remark on one key of the source."""

    kind: NoteKind
    place: str
    said: str


@dataclass
class Draft:
    """The values of an experiment of roll, as nested blocks, and the notes for its reader."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set the key at a path (`actor_train.training_args.learning_rate`). None sets nothing."""
        if value is None:
            return
        *blocks, last = path.split(".")
        node = self.values
        for block in blocks:
            node = node.setdefault(block, {})
        node[last] = value

    def at(self, path: str) -> Any:
        """Return the value at a path, or None."""
        node: Any = self.values
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def drop(self, path: str) -> None:
        """Remove the key at a path, if it is there."""
        *blocks, last = path.split(".")
        node = self.at(".".join(blocks)) if blocks else self.values
        if isinstance(node, dict):
            node.pop(last, None)

    def note(self, kind: NoteKind, place: str, said: str) -> None:
        """Add a remark, unless the same one is there."""
        if (found := Note(kind, place, said)) not in self.notes:
            self.notes.append(found)

    def of_kind(self, kind: NoteKind) -> Sequence[Note]:
        """Return the notes of one kind, in the order of the source."""
        return [note for note in self.notes if note.kind == kind]
