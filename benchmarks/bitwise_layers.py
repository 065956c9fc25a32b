"""Compares the operations of vLLM's model with those of `bitwise_kernels.py`, one by one, on one sequence. Started by
`bitwise.py`, as a process.

    python -m benchmarks.bitwise_layers FOLDER

vLLM runs the model in this process, without compilation, and reads the whole sequence in one step. On a GPU it is
batch invariant, and the other side has all of vLLM's kernels.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bitwise_kernels
from benchmarks.bitwise_trainer import load_policy
from benchmarks.bitwise_work import Work, wait_for_go
from roll.data.packing import concatenate
from roll.models.packed import packed_inputs

NAME = "layers"
PARTS = {
    "input_layernorm": "norm",
    "self_attn.qkv_proj": "queries, keys, values",
    "self_attn.attn": "attention",
    "self_attn.o_proj": "output",
    "post_attention_layernorm": "second norm",
    "mlp.gate_up_proj": "gate and up",
    "mlp.act_fn": "activation",
    "mlp.down_proj": "down",
}
"""Modules of a layer of vLLM's Qwen2, and the operations of `bitwise_kernels` whose result they return."""


def keep(kept: dict[str, Tensor], name: str, result: Tensor) -> None:
    """Keep a copy of the first result with this name: kernels write in the place of their arguments."""
    kept.setdefault(name, result.detach().clone())


def watch(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Keep the result of each operation of vLLM's model when it runs next."""

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            keep(kept, name, result[0] if isinstance(result, tuple) else result)

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any) -> None:
            keep(kept, name, torch.cat([given[0].flatten(1), given[1].flatten(1)], dim=-1))

        return hook

    inner: Any = model.model
    inner.embed_tokens.register_forward_hook(after("embedding"))
    inner.norm.register_forward_hook(after("last norm"))
    for number, layer in enumerate(inner.layers):
        layer.self_attn.attn.register_forward_pre_hook(before(f"layer {number}, rotation"))
        for part, name in PARTS.items():
            layer.get_submodule(part).register_forward_hook(after(f"layer {number}, {name}"))


def of_engine(work: Work, sequence: list[int]) -> dict[str, Tensor]:
    """Return the result of each operation of vLLM, by name."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    dtype: Any = {"bf16": "bfloat16", "fp32": "float32"}[work.dtype]
    on_gpu: dict[str, Any] = {"gpu_memory_utilization": 0.1} if work.device == "cuda" else {}
    llm = LLM(
        work.model_folder,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=len(sequence) + 1,
        max_num_batched_tokens=max(2048, len(sequence) + 1),
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,
        **on_gpu,
    )
    kept: dict[str, Tensor] = {}
    llm.apply_model(partial(watch, kept=kept))
    llm.generate([TokensPrompt(prompt_token_ids=sequence)], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return kept


def compared(engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return for each operation, in the order in which it runs, the share of equal elements and the largest difference.

    Raises:
        ValueError: an operation ran on one side only.
    """
    if missing := sorted(set(engine) ^ set(trainer)):
        raise ValueError(f"only one side ran {', '.join(missing[:5])}")
    found = []
    for name, one in trainer.items():
        other = engine[name].flatten(1)[: len(one)]  # vLLM may fill a step up with tokens
        largest = float((one.float() - other.float()).abs().max())
        found.append({"operation": name, "equal": float((one == other).float().mean()), "largest": largest})
    return found


def main() -> None:
    """Compare on the first prompt, followed by random tokens."""
    folder, work = Path(sys.argv[1]), Work.read(Path(sys.argv[1]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if work.device == "cuda":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    ids = np.concatenate(work.draw_prompts()[:2])
    engine = of_engine(work, ids.tolist())
    policy = load_policy(work)
    kernels = bitwise_kernels.ladder()[-1][1] if work.device == "cuda" else bitwise_kernels.PLAIN
    inputs = packed_inputs(concatenate([ids], [np.arange(len(ids)) > 0]), work.device)
    wait_for_go(folder, NAME)
    trainer: dict[str, Tensor] = {}
    bitwise_kernels.scored(policy.causal, inputs, kernels, partial(keep, trainer))
    (folder / f"{NAME}.json").write_text(json.dumps(compared(engine, trainer)), encoding="utf-8")


if __name__ == "__main__":
    main()
