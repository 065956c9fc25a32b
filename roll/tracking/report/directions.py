"""The better direction of metrics. Most metrics have none: a low entropy, for example, is neither good nor bad in
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

Direction = Literal["higher", "lower"]
HIGHER = re.compile(
    r"reward/([^/]+/)?mean|reward/scored_fraction|val/.+/((pass|maj|avg)@\w+|accuracy|reward_margin|margin)"
    r"|(dpo|reward_model)/(accuracy|reward_margin|margin)|critic/explained_variance|throughput/.+"
)
LOWER = re.compile(
    r"(sft|dpo|reward_model|distill)/loss|distill/divergence|val/.+/(loss|perplexity|divergence)|time/step"
)


def direction(name: str) -> Direction | None:
    """Return the better direction of a metric; None if it has none.

    The policy loss has none, because it does not measure the quality of the policy.
    """
    if HIGHER.fullmatch(name):
        return "higher"
    return "lower" if LOWER.fullmatch(name) else None


def best_of(name: str) -> Callable[[Iterable[float]], float] | None:
    """Return the function that picks the best of a metric's values, `max` or `min`; None if the metric has no better
    direction.
    """
    ways: dict[Direction | None, Callable[[Iterable[float]], float] | None] = {"higher": max, "lower": min, None: None}
    return ways[direction(name)]
