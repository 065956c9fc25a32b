"""Whether higher or lower is better for a metric, if either is."""

from __future__ import annotations

import pytest

from roll.tracking.report.records import best_of, direction


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", "higher"),
        ("reward/math_rule/mean", "higher"),
        ("reward/scored_fraction", "higher"),
        ("val/gsm8k/pass@1", "higher"),
        ("val/a/b/maj@8", "higher"),
        ("val/gsm8k/avg@4", "higher"),
        ("val/pairs/accuracy", "higher"),
        ("val/pairs/reward_margin", "higher"),
        ("dpo/accuracy", "higher"),
        ("reward_model/margin", "higher"),
        ("throughput/tokens_per_second", "higher"),
        ("critic/explained_variance", "higher"),
        ("sft/loss", "lower"),
        ("distill/divergence", "lower"),
        ("val/held_out/loss", "lower"),
        ("val/held_out/perplexity", "lower"),
        ("time/step", "lower"),
        ("reward/std", None),
        ("reward/math_rule/length_penalty/mean", None),
        ("policy/loss", None),
        ("policy/entropy", None),
        ("policy/kl_ref", None),
        ("policy/grad_norm", None),
        ("critic/loss", None),
        ("response/length_mean", None),
        ("val/gsm8k/length_mean", None),
        ("val/gsm8k/policy_version", None),
        ("engine/idle_fraction", None),
        ("time/rollout", None),
    ],
)
def test_direction(name: str, expected: str | None) -> None:
    assert direction(name) == expected
    best = best_of(name)
    assert (best and best([2.0, 1.0, 3.0])) == {"higher": 3.0, "lower": 1.0, None: None}[expected]
