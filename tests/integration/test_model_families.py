"""Families of models that the guides use, in whole runs: SFT of all weights, then RLVR with an adapter and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from examples.tiny.make_model import END_ID, PAD_ID, START_ID, VOCABULARY, build_tokenizer
from tests.integration.conftest import SMALL, World
from tests.integration.test_hybrid import loss

pytestmark = [pytest.mark.engines, pytest.mark.full]

Make = Callable[[], PreTrainedModel]

TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD_ID,
    "bos_token_id": START_ID,
    "eos_token_id": END_ID,
}
# The engine has kernels for heads of at least 32 numbers on the CPU.
WIDE: dict[str, Any] = TOKENS | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**WIDE, ffn_dim=128, word_embed_proj_dim=64))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**TOKENS, n_embd=64, n_layer=2, n_head=2, n_positions=64))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**WIDE, intermediate_size=128, num_key_value_heads=1))


def write(model: PreTrainedModel, folder: Path, pickled: bool) -> None:
    """Write a model folder, with the weights in pytorch_model.bin if they are to be pickled."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize(("make", "pickled"), [(opt, False), (gpt2, False), (llama, True)], ids=["opt", "gpt2", "bin"])
def test_a_family_is_fine_tuned_then_trained(world: World, make: Make, pickled: bool) -> None:
    name = make.__name__
    torch.manual_seed(0)
    write(make(), world.folder / name, pickled)
    keys = ("max_steps=8", "save_steps=0", "eval_steps=8", "data_split=[9,1,0]")
    outcome = world.run("--config-name", "tiny/tiny_sft", f"pretrain={name}", *keys, f"output_dir={name}_sft")
    assert outcome.status == 0, outcome.output
    lines, export = world.metrics(f"{name}_sft"), world.folder / f"{name}_sft" / "export"
    assert lines[-1]["val/validation/loss"] < lines[0]["val/validation/loss"] - 0.5
    assert loss(export, world) == pytest.approx(lines[-1]["val/validation/loss"], abs=1e-5)

    keys = ("max_steps=3", "save_steps=0", "num_return_sequences_in_group=4", f"output_dir={name}_rlvr", *SMALL)
    keys += ("entropy_loss_coef=0.1",)  # so that there is a gradient even if all responses are wrong
    keys += ("weight_sync.lora=merged",) if make is gpt2 else ()  # vLLM serves no adapters of GPT-2
    outcome = world.run("--config-name", "tiny/tiny_rlvr_lora_zero3", f"pretrain={name}_sft/export", *keys)
    assert outcome.status == 0, outcome.output
    steps = world.metrics(f"{name}_rlvr")[1:]
    assert max(step["mismatch/logprob_abs_diff_mean"] for step in steps) < 1e-5
    assert all(step["policy/grad_norm"] > 0 and step["policy/skipped_updates"] == 0 for step in steps)
    assert AutoModelForCausalLM.from_pretrained(export).config.model_type == make().config.model_type
