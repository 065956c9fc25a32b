"""Writes a draft as the YAML of an experiment, with the notes as comments."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from roll.convert.draft import TITLES, Draft, NoteKind

FIRST = (
    "defaults",
    "exp_name",
    "output_dir",
    "pipeline",
    "pretrain",
    "max_steps",
    "rollout_batch_size",
    "num_return_sequences_in_group",
    "updates_per_step",
)
ROLES = ("actor_train", "sft_train", "reward_train", "actor_infer", "reference", "critic", "rewards", "validation")
LONGEST_LIST = 60
LONGEST_LINE = 90
WIDTH = 118


def experiment_text(draft: Draft, of: str) -> str:
    """Return the YAML of an experiment. `of`: what it was translated from, for the first line."""
    head = [f"# python -m roll.convert: translated from {of}.", *_comments(draft)]
    blocks = sorted(draft.values, key=_place)
    return "\n".join([*head, *(_block(name, draft.values[name]) for name in blocks)]) + "\n"


def notes_text(draft: Draft, kinds: tuple[NoteKind, ...] = ("lost", "changed", "assumed", "idle")) -> str:
    """Return the notes, by kind, for a terminal."""
    lines = []
    for kind in kinds:
        if notes := draft.of_kind(kind):
            lines += [f"{TITLES[kind]}:", *(f"  {note.place}: {note.said}" for note in notes)]
    return "\n".join(lines)


def _comments(draft: Draft) -> list[str]:
    lines: list[str] = []
    for kind in ("lost", "changed", "assumed"):
        if notes := draft.of_kind(kind):
            lines.append(f"# {TITLES[kind].capitalize()}:")
            for note in notes:
                lines += textwrap.wrap(
                    f"{note.place}: {note.said}", WIDTH, initial_indent="#   ", subsequent_indent="#     "
                )
    if idle := draft.of_kind("idle"):
        names = ", ".join(note.place for note in idle)
        lines += textwrap.wrap(
            f"{TITLES['idle'].capitalize()}: {names}.",
            WIDTH,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
    return lines


def _place(name: str) -> tuple[int, int]:
    """Return the place of a root key: names and numbers of the step, other values in their order, then roles."""
    if name in FIRST:
        return 0, FIRST.index(name)
    return (2, ROLES.index(name)) if name in ROLES else (1, 0)


def _block(name: str, value: Any) -> str:
    written = yaml.dump({name: value}, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    return ("\n" if isinstance(value, dict) and name in ROLES else "") + written.rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Writes short lists and small blocks of plain values in one line, and never an anchor."""

    depth = 0

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.nodes.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=len(str(list(sequence))) <= LONGEST_LIST)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.nodes.MappingNode:
        is_plain = not any(isinstance(value, dict | list) for value in mapping.values())
        in_line = self.depth > 0 and is_plain and len(str(mapping)) <= LONGEST_LINE
        self.depth += 1
        try:
            return super().represent_mapping(tag, mapping, flow_style=in_line)
        finally:
            self.depth -= 1
