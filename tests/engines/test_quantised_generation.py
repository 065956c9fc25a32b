"""vLLM with linear layers in 8 bits: its log-probs are those of a policy whose weights and activations are rounded so,
at the start and after a weight sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.engines.vllm.strategy import QUANTIZATION
from roll.errors import WeightSyncError
from roll.models.packed import PackedPolicy
from roll.models.weights import WeightView
from roll.types import Sampling
from tests import limits
from tests.engines.generating import MAX_MODEL_LEN, PROMPTS, Running, engine_log_probs, log_probs, policy, running

pytestmark = pytest.mark.usefixtures("as_in_workers")
LARGEST = 448.0
"""Largest number of the format e4m3."""


class RoundedLinear(nn.Module):
    """A linear layer of numbers in e4m3: weights with a scale for each output, inputs with one for each token.

    Inputs and outputs are rounded to fp16, as in the engine: near the middle of two numbers of e4m3 that decides.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.detach()), linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [..., O] of inputs [..., I]."""
        return nn.functional.linear(rounded(inputs.half().float()), self.weight, self.bias).half().float()


def rounded(rows: Tensor) -> Tensor:
    """Round each row [..., N] to multiples of e4m3's numbers whose largest is the row's. A row of zeros remains one."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def quantised(whole: PackedPolicy) -> PackedPolicy:
    """Return a copy of a policy whose linear layers, without the head, are rounded to 8 bits."""
    copied = deepcopy(whole.causal)
    for name, module in list(copied.named_modules()):
        if isinstance(module, nn.Linear) and module is not copied.get_output_embeddings():
            copied.set_submodule(name, RoundedLinear(module))
    return PackedPolicy(copied)


def in_fp16(model: Path, seed: int | None = None) -> PackedPolicy:
    """Return a policy with the engine's weights, which are fp16, in fp32."""
    whole = policy(model, seed)
    for parameter in whole.causal.parameters():
        parameter.data = parameter.data.half().float()
    return whole


@pytest.fixture(scope="module")
def engine(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    block = {"enforce_eager": True, "kv_cache_gib": 0.25, "max_num_seqs": 64, "quantization": "fp8"}
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
    settings = VllmSettings(
        str(small_model),
        ModelConfig.model_validate({"dtype": "fp16"}),
        VllmConfig.model_validate(block),
        MAX_MODEL_LEN,
        adapter_rank=None,
        seed=0,
        takes_turns=False,
        keeps_kv_cache=False,
    )
    with running("vllm", small_model, tmp_path_factory.mktemp("quantised"), settings.build(rank)) as one:
        yield one


def distances(one: Running, whole: PackedPolicy) -> tuple[float, float]:
    """Return the mean absolute differences of the engine's log-probs to those of the policy in 8 bits, and to those of
    the policy as it is, in nats per token.
    """
    sampling = Sampling(24, samples=4, ignore_eos=True)
    small, apart = quantised(whole), []
    for prompt, completions in zip(PROMPTS, one.generate(PROMPTS, sampling), strict=True):
        for completion in completions:
            said = engine_log_probs(completion)
            apart.append([np.abs(said - log_probs(other, prompt, completion, 1.0)).mean() for other in (small, whole)])
    to_small, to_whole = np.mean(apart, axis=0)
    return float(to_small), float(to_whole)


def test_log_probs_are_those_of_rounded_layers(engine: Running, small_model: Path) -> None:
    for seed in (None, 3):
        whole = in_fp16(small_model, seed)
        if seed is not None:
            engine.push(whole)
        to_small, to_whole = distances(engine, whole)
        assert to_small < 0.75 * to_whole, (seed, to_small, to_whole)
        assert to_whole < 0.2, "the rounding changes little"


def test_weights_that_were_not_sent_are_named(engine: Running, small_model: Path) -> None:
    whole, left_out = in_fp16(small_model, 5), "model.layers.0.mlp.down_proj.weight"
    buckets = engine.buckets(WeightView(whole.model), leave_out=[left_out])
    with pytest.raises(WeightSyncError, match=left_out):
        engine.wait(engine.update(buckets, engine.version + 1))


@pytest.mark.parametrize(
    ("layer", "is_kept"),
    [
        ("model.layers.3.mlp.gate", True),
        ("model.layers.3.mlp.shared_expert_gate", True),
        ("score", True),
        ("model.layers.3.mlp.gate_up_proj", False),
        ("model.layers.3.self_attn.qkv_proj", False),
    ],
)
def test_routers_and_scores_are_not_quantised(layer: str, is_kept: bool) -> None:
    ignored = QUANTIZATION["fp8"]["quantization_config"]["ignore"]
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    assert should_ignore_layer(layer, ignored, fused, use_fnmatch=True) is is_kept
