"""Rewards of a source's own, which are not translated: the experiment is refused until the user names one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.convert.draft import Draft

UNSET = "???"
"""OmegaConf's value of a key that must be set: a run without it is refused, with the name of the key."""


def reward_name(written: Any) -> str:
    """Return a name for a domain or a part: that of the function in `module:function` or in a call that makes it, or of
    a file without `.py`.
    """
    last = re.split(r"[/:.]", re.sub(r"\.py$|\(.*", "", str(written).strip(), flags=re.DOTALL))[-1]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", last).strip("_") or "reward_func"


def put_own_reward(draft: Draft, place: str, written: Any, domain: str, page: str) -> None:
    """Let a run be refused until it has the reward that the source calls by a key.

    Args:
        draft: the experiment.
        place: the source's key.
        written: what the key says.
        domain: name of the domain here.
        page: page that shows how the other program's function is called.
    """
    draft.put(f"rewards.{domain}.reward", UNSET)
    draft.put(f"rewards.{domain}.world_size", 8)
    note_own_reward(draft, place, written, [f"rewards.{domain}.reward"], page)


def note_own_reward(draft: Draft, place: str, written: Any, keys: Sequence[str], page: str) -> None:
    """Say which keys must be set before a run starts."""
    said = f"{written}: write a function of one response ({page} shows how it calls yours), and set"
    draft.note("lost", place, f"{said} {' and '.join(keys)}; until then a run is refused")
