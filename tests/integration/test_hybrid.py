"""A hybrid model with Qwen3.5's architecture in whole runs: SFT, then RLVR with an adapter and the engine
`hf_infer`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hybrids import write_hybrid
from tests.integration.conftest import SMALL, World
from tests.integration.test_offline import held_out

pytestmark = [pytest.mark.engines, pytest.mark.full]

STEPS = 12
FINE_TUNING = (
    "pretrain=hybrid",
    f"max_steps={STEPS}",
    f"save_steps={STEPS}",
    f"eval_steps={STEPS}",
    "data_split=[9,1,0]",
)
ENGINE = ("~actor_infer.strategy_args.strategy_config", "actor_infer.strategy_args.strategy_name=hf_infer")
LEARNING = ("max_steps=3", "save_steps=3", "num_return_sequences_in_group=4", "response_length=4", *SMALL, *ENGINE)


@torch.no_grad()
def loss(folder: Path, world: World) -> float:
    """Return the loss on the held-out rows, computed with transformers alone, in nats per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for (sequence,) in held_out(world, "responses", prompt="prompt", response="response"):
        ids, where = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.response_mask.nonzero()[0])
        log_p = model(input_ids=ids[None], use_cache=False).logits[0, where - 1].double().log_softmax(-1)
        found.append(-log_p.gather(1, ids[where][:, None])[:, 0])
    return float(torch.cat(found).mean())


def test_hybrid_is_fine_tuned_then_trained_by_rlvr(world: World) -> None:
    write_hybrid(world.folder / "hybrid")
    outcome = world.run("--config-name", "tiny/tiny_sft", *FINE_TUNING, "output_dir=hybrid_sft")
    assert outcome.status == 0, outcome.output
    assert "in a separate row" in " ".join(outcome.output.split())
    lines = world.metrics("hybrid_sft")
    assert lines[-1]["val/validation/loss"] < lines[0]["val/validation/loss"] - 1
    export = world.folder / "hybrid_sft" / "export"
    assert loss(export, world) == pytest.approx(lines[-1]["val/validation/loss"], abs=1e-5)

    outcome = world.run(
        "--config-name", "tiny/tiny_rlvr_lora_zero3", "pretrain=hybrid_sft/export", *LEARNING, "output_dir=hybrid_rlvr"
    )
    assert outcome.status == 0, outcome.output
    steps = world.metrics("hybrid_rlvr")[1:]
    assert len(steps) == 3
    # The engine samples with cached states, while the trainer processes packed sequences. Steps 2 and 3 follow a weight
    # sync.
    assert max(step["mismatch/logprob_abs_diff_mean"] for step in steps) < 1e-5
    assert all(np.isfinite(step["policy/loss"]) and step["policy/skipped_updates"] == 0 for step in steps)
