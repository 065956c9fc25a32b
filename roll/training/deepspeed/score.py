"""Scores with a model that ZeRO-3 shards over its ranks, for reference and teacher models too large for one device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import deepspeed
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from roll.backend import Rank
from roll.config.plan.memory import compiles
from roll.models.layers import compile_layers
from roll.models.load import load_fixed_model
from roll.models.memory_guard import OFFLOAD, readable_memory_errors
from roll.models.offload import Offload
from roll.models.packed import PackedModel, PackedScore
from roll.system.signs import announce
from roll.training.deepspeed.settings import ShardedScoreSettings
from roll.training.deepspeed.setup import (
    compiling_in_turn,
    engine_config,
    gather_whole_experts,
    gather_whole_layers,
    join_process_group,
    own_swap,
)


class DeepSpeedScore(PackedScore):
    """Implements `ScoreStrategy`, and `TeachStrategy` if `settings.wrap` builds a teacher."""

    def __init__(self, settings: ShardedScoreSettings, rank: Rank) -> None:
        self._held = ExitStack()
        self._held.enter_context(compiling_in_turn(rank))
        announce("joining the process group")
        join_process_group(rank)
        with readable_memory_errors(rank, "loading the model", OFFLOAD):
            policy = self._build(settings, rank)
        super().__init__(policy, self._engine, rank, Offload(rank.device))

    def _build(self, settings: ShardedScoreSettings, rank: Rank) -> PackedModel:
        compiled = compiles(settings.model_args, on_gpu=rank.device == "cuda")
        zero = settings.deepspeed.zero_optimization.model_copy(update={"offload_optimizer": None})
        swapping = self._held.enter_context(
            own_swap(settings.deepspeed.model_copy(update={"zero_optimization": zero}), rank)
        )
        config = engine_config(swapping, settings.model_args.dtype, max_grad_norm=None, compiled=compiled)
        # Must outlive the engine. While this object exists, from_pretrained shards models during loading.
        self._shards_at_load = HfDeepSpeedConfig(config)
        announce("loading the model")
        policy = settings.wrap(load_fixed_model(settings.model_path, settings.model_args))
        gather_whole_experts(policy.causal)
        if compiled:
            compile_layers(policy.causal)
            gather_whole_layers(policy.causal)
        announce("model loaded; building the engine")
        self._engine: Any = deepspeed.initialize(model=policy, config=config)[0]
        self._engine.eval()
        return policy

    def close(self) -> None:
        self._engine.destroy()
        self._held.close()
        torch.distributed.destroy_process_group()
