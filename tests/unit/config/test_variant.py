"""The plan shows the variant of a run: the plans of any two configurations differ in a line that names the changed
key.
"""

from __future__ import annotations

import io
from functools import cache
from itertools import combinations

import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.plan.show import flat_text, show_plan, variant_lines, yaml_text
from roll.config.schema.pipelines import Config

WIDE = 100_000
"""Width of the console in characters, so large that no line wraps."""
ZERO = "actor_train.strategy_args.strategy_config.zero_optimization"
SAMPLING, LEARNER, TRAINING = "actor_infer.generating_args", "actor_train.model_args", "actor_train.training_args"
VARIABLES = ("lora_target", "lora_rank", "lora_alpha")
"""Root keys that the example's file defines only for its own `${...}` expressions."""
ALL_WEIGHTS = (f"{LEARNER}.lora_target=null", "actor_infer.model_args.lora_target=null")
VARIANTS = (
    (f"{LEARNER}.lora_rank=64", "actor_infer.model_args.lora_rank=64"),
    (f"{LEARNER}.lora_alpha=16", "actor_infer.model_args.lora_alpha=16"),
    (f"{LEARNER}.lora_target=q_proj", "actor_infer.model_args.lora_target=q_proj"),
    ALL_WEIGHTS,
    (f"{LEARNER}.dtype=fp16",),
    (f"++{LEARNER}.gradient_checkpointing=all",),
    (f"{ZERO}.stage=2",),
    (f"++{ZERO}.offload_optimizer={{device: cpu}}",),
    (f"++{ZERO}.offload_param={{device: cpu}}",),
    (f"{TRAINING}.learning_rate=3.0e-6",),
    (f"++{TRAINING}.lr_scheduler_type=cosine",),
    (f"++{TRAINING}.optimizer=lion",),
    (f"{TRAINING}.warmup_steps=7",),
    (f"++{TRAINING}.weight_decay=0.1",),
    (f"++{TRAINING}.adam_beta2=0.95",),
    ("adv_estimator=grpo",),
    ("adv_estimator=rloo",),
    ("++norm_std_type=group",),
    ("whiten_advantages=false",),
    ("++policy_loss=gspo", "dual_clip_loss=false"),
    ("++policy_loss=cispo", "dual_clip_loss=false"),
    ("++pg_clip=0.3",),
    ("++pg_clip_high=0.28",),
    ("++loss_agg_mode=token-mean",),
    ("++entropy_loss_coef=0.01",),
    ("++ppo_epochs=2",),
    ("++use_kl_loss=true", "++kl_loss_coef=0.01"),
    ("++use_kl_loss=true", "++kl_loss_coef=0.02"),
    ("++use_kl_loss=true", "++kl_loss_coef=0.01", "++kl_loss_type=k2"),
    ("++add_token_level_kl=true", "++init_kl_coef=0.05"),
    ("++mismatch_correction=tis", "++behaviour_log_probs=trainer"),
    ("++behaviour_log_probs=trainer",),
    (f"++{SAMPLING}.temperature=0.7",),
    (f"++{SAMPLING}.seeded=true",),
    ("++track_with=none",),
    ("seed=7",),
    ("save_steps=50",),
    ("reward_clip=5",),
    ("++max_running_samples=96",),
    ("++max_restarts=1",),
    ("++time_sharing=false",),
    ("++max_grad_norm=0.5",),
)


@cache
def base() -> DictConfig:
    found: list[DictConfig] = []

    def keep(document: DictConfig, presets: set[str]) -> None:
        whole = OmegaConf.to_container(document, resolve=True)
        assert isinstance(whole, dict)
        # The `${...}` expressions are resolved, so the keys that only they used can go.
        found.append(
            OmegaConf.create({key: value for key, value in whole.items() if key not in {*presets, *VARIABLES}})
        )

    compose(["--config-name", "qwen2.5-7B-rlvr/rlvr_lora_zero3", "dry_run=true"], keep)
    return found[0]


def composed(*words: str) -> Config:
    """Return the base configuration with these overrides. Hydra composes the base only once, because it takes longer
    than the tests.
    """
    document = base().copy()
    document.merge_with_dotlist([word.lstrip("+") for word in words])
    return checked_config(document, imports=False)


def keys_of(words: tuple[str, ...]) -> set[str]:
    return {word.lstrip("+").partition("=")[0].rpartition(".")[2] for word in words}


def shown(config: Config) -> set[str]:
    out = io.StringIO()
    show_plan(config, make_plan(config), Console(file=out, width=WIDE))
    return set(out.getvalue().splitlines())


def test_plans_of_any_two_variants_differ_by_key() -> None:
    plans = [(keys_of(words), shown(composed(*words))) for words in ((), *VARIANTS)]
    assert len(plans) > 40
    for (keys, one), (others, other) in combinations(plans, 2):
        varied = keys | others if keys == others else keys ^ others
        assert any(key in line for line in one ^ other for key in varied), (keys, others)


def test_plan_shows_full_training_without_offload() -> None:
    lines = variant_lines(composed(*ALL_WEIGHTS))
    assert (
        lines[0].startswith("Learns: actor_train.model_args: lora_target none, dtype bf16")
        and "lora_rank" not in lines[0]
    )
    assert "ZeRO: actor_train.zero_optimization: stage 3, offload_optimizer none, offload_param none" in lines


def test_no_secret_is_shown() -> None:
    lines = variant_lines(composed("++system_envs={MY_TOKEN: hunter2}"))
    assert not any("hunter2" in line for line in lines) and any("MY_TOKEN ***" in line for line in lines)


def test_texts_of_values() -> None:
    tree = {"a": {"b": 1e-6, "c": None, "d": {}}, "e": [True, 2.0], "f": "text"}
    assert flat_text(tree) == {"a.b": "1e-06", "a.c": "none", "e": "[true, 2]", "f": "text"}
    assert yaml_text(0.1 + 0.2) == "0.30000000000000004", "different numbers must look different"


@pytest.mark.parametrize("width", [60, 80])
def test_plan_table_keeps_every_cell_in_narrow_terminals(width: int) -> None:
    out = io.StringIO()
    config = composed()
    show_plan(config, make_plan(config), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    assert any(line.split()[:1] == ["optimizer"] for line in lines)
