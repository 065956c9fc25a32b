"""Forward passes and training of the transformers model itself, on packed rows in plain torch. Only the attention
kernel is roll's.

On a GPU every decoder layer is compiled separately and, in training, recomputed in the backward pass. On one rank the
optimizer is torch's AdamW on the model's own weights. On several ranks, and for ZeRO-3, plain DeepSpeed is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from benchmarks.work import TrainingWork, Work
from roll.models.attention import register_packed_kernel

HEAD_CHUNK = 4096
"""Number of tokens whose logits are computed at a time."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEARNING_RATE = 1e-6
"""Learning rate, the same as in the experiments of `benchmarks/config`."""
Timer = Callable[[Callable[[], object]], list[float]]
"""A function that repeats a function on all ranks at the same time and returns the seconds of each repetition."""


class LogProbs(nn.Module):
    """A module that computes the log-probs of all tokens of a packed row except the first."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, row: dict[str, Any]) -> Tensor:
        """Return fp32 [T - 1]. Logits are recomputed in the backward pass, chunk by chunk."""
        hidden = self.causal.model(**row).last_hidden_state[0, :-1]
        targets = row["input_ids"][0, 1:]
        chunks = zip(hidden.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self.score, *chunk, use_reentrant=True) for chunk in chunks])
        return torch.cat([self.score(*chunk) for chunk in chunks])

    def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probs of the targets, fp32 [C], from the hidden states [C, H] before them."""
        logits = self.causal.lm_head(hidden).float()
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


def load(work: TrainingWork, lora: bool) -> Any:
    """Load the transformers model, optionally with an adapter on every linear layer."""
    causal: Any = AutoModelForCausalLM.from_pretrained(
        work.model, dtype=DTYPES[work.dtype], attn_implementation=register_packed_kernel()
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=work.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        causal = get_peft_model(causal, settings, autocast_adapter_dtype=False).get_base_model()
    return causal


def compile_layers(causal: Any, dynamic: bool | None = None) -> None:
    """Compile one function for all decoder layers. One compiled function per layer would soon reach dynamo's recompile
    limit.
    """
    layers = causal.model.layers
    forward = torch.compile(type(layers[0]).forward, dynamic=dynamic)
    for layer in layers:
        layer.forward = MethodType(forward, layer)


def trainable(work: TrainingWork, checkpointed: int, compiled: bool, dynamic: bool | None = None) -> Any:
    """Return the transformers model for training. Its first `checkpointed` layers are recomputed in the backward pass.

    `dynamic` is the argument of `torch.compile`; if it is True, the same compiled code runs rows of any length.
    """
    causal = load(work, work.lora_rank > 0).train()
    causal.enable_input_require_grads()
    if checkpointed:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        for number, layer in enumerate(causal.model.layers):
            layer.gradient_checkpointing = number < checkpointed
    if compiled:
        compile_layers(causal, dynamic)
    if compiled and work.stage == 3:
        from deepspeed.utils import set_z3_leaf_modules

        # ZeRO-3 must gather a layer before it runs, because compiled code cannot stop for a hook.
        set_z3_leaf_modules(causal, [type(causal.model.layers[0])])
    return causal


def packed_rows(work: Work, rank: int, ranks: int, device: str) -> list[dict[str, Any]]:
    """Return this rank's sequences in rows of at most the token budget, as keyword arguments of a transformers model.

    The numbers of sequences of any two rows differ by at most one.
    """
    count = work.sequences // ranks
    per_row = max(1, work.token_budget // work.length)
    number = -(-count // per_row)
    generator = torch.Generator().manual_seed(rank)
    rows = []
    for size in (count // number + (index < count % number) for index in range(number)):
        offsets = torch.arange(0, (size + 1) * work.length, work.length, dtype=torch.int32).to(device)
        ids = torch.randint(0, work.shape["vocab_size"], (1, size * work.length), generator=generator)
        rows.append(
            {
                "input_ids": ids.to(device),
                "position_ids": torch.arange(work.length).repeat(size)[None].to(device),
                "use_cache": False,
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": work.length,
                "max_length_k": work.length,
            }
        )
    return rows


def forward(work: Work, rank: int, device: str, timer: Timer) -> dict[str, list[float]]:
    """Measure passes without gradients over the rank's sequences. Return the seconds of each repetition, by name.

    The names are `forward`, and also `forward_adapter` if a step runs a pass with the adapter.
    """
    rows = packed_rows(work, rank, work.score_ranks, device)
    figures = {}
    adapter = work.lora_rank > 0 and work.behaviour == "trainer"
    for name, lora in [("forward", False)] + [("forward_adapter", True)] * adapter:
        model = LogProbs(load(work, lora).to(device).eval())
        if device == "cuda":
            compile_layers(model.causal)
        with torch.no_grad():
            figures[name] = timer(lambda model=model: [model(row) for row in rows])
    return figures


def train(work: Work, rank: int, device: str, timer: Timer) -> dict[str, list[float]]:
    """Measure one optimizer step on the rank's sequences. Return the seconds of each repetition, under `train`."""
    rows = packed_rows(work, rank, work.train_ranks, device)
    on_gpu = device == "cuda"

    def build() -> nn.Module:
        return LogProbs(trainable(work, work.shape["num_hidden_layers"] if on_gpu else 0, compiled=on_gpu))

    by_deepspeed = work.train_ranks > 1 or work.stage == 3
    with deepspeed_trainer(work, rank, device, build) if by_deepspeed else bare_trainer(build(), device) as trainer:

        def update() -> None:
            for row in rows:
                trainer.backward(-trainer.model(row).mean() / len(rows))
            trainer.step()

        return {"train": timer(update)}


@dataclass(frozen=True)
class Trainer:
    """The functions of a training loop, with or without DeepSpeed."""

    model: Callable[..., Any]
    backward: Callable[[Tensor], object]
    step: Callable[[], object]


@contextmanager
def bare_trainer(model: nn.Module, device: str) -> Iterator[Trainer]:
    """Yield the functions that train the model with torch alone."""
    model = model.to(device)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    yield Trainer(model, Tensor.backward, step)


@contextmanager
def deepspeed_trainer(work: TrainingWork, rank: int, device: str, build: Callable[[], nn.Module]) -> Iterator[Trainer]:
    """Yield the functions that train the model from `build` with plain DeepSpeed."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(work.train_ranks)}
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": work.dtype == "bf16"},
        "zero_optimization": {"stage": work.stage, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if device == "cuda" and work.stage == 3:
        # DeepSpeed's own linear function reads the id of each weight, so dynamo would recompile for every layer.
        config["zero_optimization"]["memory_efficient_linear"] = False
    place = {"init_method": f"file://{work.scratch}/rendezvous", "rank": rank, "world_size": work.train_ranks}
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False, **place)
    sharded = HfDeepSpeedConfig(config) if work.stage == 3 else None
    model = build()
    engine: Any = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    try:
        yield Trainer(engine, engine.backward, engine.step)
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()
        del sharded


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=LEARNING_RATE, fused=True
    )
