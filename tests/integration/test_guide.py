"""The snippet of a guide to ROLL's DeepSpeed backend, on top of `rlvr_lora_zero3`, trains on the CPU.

Only the model, the data files and the devices are overridden, and the number of prompts: 8 instead of 64, for 2 ranks
instead of 16, so that a step still makes one update of 32 sequences per rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from examples.tiny.make_model import AGENT_TEMPLATE
from tests.integration.conftest import World
from tests.integration.test_roll_domains import ROWS, rows

pytestmark = [pytest.mark.engines, pytest.mark.full]

SNIPPET = """
defaults:
  - ../qwen2.5-7B-rlvr/rlvr_lora_zero3@_here_
  - ../config/deepspeed_zero3@_here_
  - ../config/deepspeed_zero3_cpuoffload@_here_
  - _self_
actor_train:
  model_args:
    attn_implementation: fa2
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
  training_args:
    learning_rate: 1.0e-5
    weight_decay: 0
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 32
    warmup_steps: 20
    num_train_epochs: 50
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}
  device_mapping: list(range(0,16))
  infer_batch_size: 4
"""
"""The guide's snippet. The first and the last entry of `defaults` are added."""
FILES = {
    "math": ("math_deepmath_deal", "math_benchmarks"),
    "code": ("code_KodCode_data",),
    "ifeval": ("general_ifeval_train_deal",),
    "choice": ("general_CrossThink-QA_deal",),
    "judge": ("llm_judge_Multi-subject-RLVR_deal_new",),
}
"""Names of the example's files, by the domain of their rows."""
STEPS = 10
SAID = (
    "model_args.model_type: null is ignored",
    "model_args.disable_gradient_checkpointing: true is read as actor_train.model_args.gradient_checkpointing=none",
    "training_args.num_train_epochs: has no effect",
    "infer_batch_size: 4 has no effect",
)
"""Beginnings of the warnings about the snippet's keys, without the role. That about fa2 has its own beginning."""


@pytest.fixture
def guide(world: World) -> list[str]:
    """Write the snippet, its model and its data files, and return the arguments of the run.

    The model is the warmed-up policy with the positions of a model of 8k tokens. It ends its responses after a few.
    """
    (world.folder / "guide").mkdir()
    (world.folder / "guide" / "snippet.yaml").write_text(SNIPPET)
    (world.folder / "data").mkdir()
    for domain, names in FILES.items():
        text = "".join(json.dumps(rows(number)[domain]) + "\n" for number in range(ROWS))
        for name in names:
            (world.folder / "data" / f"{name}.jsonl").write_text(text)
    model = world.folder / "long"
    shutil.copytree(world.folder / "warm" / "export", model)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | {key: 8192}))
    (model / "chat_template.jinja").write_text(AGENT_TEMPLATE)
    model_keys = ["pretrain=long", "rewards.llm_judge.model_args.model_name_or_path=long"]
    roles = ("actor_train", "actor_infer", "reference", "rewards.llm_judge")
    devices = [*(f"{role}.device_mapping=null" for role in roles), "actor_train.world_size=2"]
    shorter = [f"max_steps={STEPS}", "rollout_batch_size=8"]
    return ["--config-path", "guide", "--config-name", "snippet", *model_keys, *devices, *shorter]


def resolved(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run wrote."""
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(values, dict)
    return values["actor_train"]


def test_a_guide_s_snippet_trains_ten_steps(world: World, guide: list[str]) -> None:
    outcome = world.run(*guide)
    assert outcome.status == 0, outcome.output
    said = [line for line in outcome.output.splitlines() if line.startswith("warning: actor_train")]
    for start in SAID:
        assert len([line for line in said if line.startswith(f"warning: actor_train.{start}")]) == 1, said
    assert [line for line in said if "attn_implementation: fa2 is read as auto" in line]
    assert len(said) == len(SAID) + 1
    folder = "output/qwen2.5-7B-rlvr-lora-zero3"
    learner = resolved(world.folder / folder)
    assert learner["model_args"]["dtype"] == "bf16"
    assert learner["strategy_args"]["strategy_config"]["zero_optimization"]["stage"] == 3
    assert learner["training_args"]["weight_decay"] == 0
    lines = world.metrics(folder)[1:]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["policy/lr"] for line in lines] == pytest.approx([step / 20 * 1e-5 for step in range(STEPS)])
    for line in lines:
        assert line["policy/skipped_updates"] == 0 and line["response/truncated_fraction"] == 0
        assert line["memory/actor_train/token_budget"] == 2048 + 4096
        assert line["memory/actor_train/checkpointed_layers"] == 0
    assert any(line["policy/grad_norm"] > 0 for line in lines)
