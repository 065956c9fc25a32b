"""Attention heads for which vLLM has no kernel on the CPU: exit status 2 before anything starts, with place, value and
remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config.checks.backends import backend_needs
from roll.config.derived.model_shape import shape_of
from roll.config.schema.rlvr import RlvrConfig
from roll.engines.vllm.checks import CPU_HEADS
from tests.unit.config.test_examples import planned

TINY: dict[str, int | str] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
LATENT: dict[str, int | str] = {"model_type": "deepseek_v3", "kv_lora_rank": 64, "num_attention_heads": 16}


def test_head_size_without_kernel_is_refused_before_start(
    refused: Callable[..., str], tiny_model: Path, tmp_path: Path
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    message = refused(f"pretrain={tmp_path}")
    assert "actor_infer.strategy_args.strategy_name: vllm, but" in message
    assert "heads of size 16;" in message
    assert "use hf_infer, a GPU (device_mapping)" in message
    assert "heads of size" not in refused(
        f"pretrain={tmp_path}", "actor_infer.strategy_args.strategy_name=hf_infer", "max_steps=0"
    )


@pytest.mark.parametrize(
    ("values", "device_mapping", "heads"),
    [
        ({"num_attention_heads": 8}, None, 16),
        ({"head_dim": 24}, None, 24),
        ({"head_dim": 576}, None, 576),
        ({"head_dim": 48}, None, None),
        ({}, None, None),
        ({"num_attention_heads": 8}, [0], None),
        (LATENT, None, None),
    ],
    ids=["derived", "given", "large", "not in vLLM's list", "sound", "GPU", "latent"],
)
def test_head_size_fault_concerns_cpu_engines_only(
    values: dict[str, int | str], device_mapping: list[int] | None, heads: int | None
) -> None:
    shape, config = shape_of(TINY | values), planned("tiny/tiny_rlvr_lora_zero3")[0]
    assert shape is not None and isinstance(config, RlvrConfig)
    engine = config.actor_infer.model_copy(update={"device_mapping": device_mapping})
    shapes = {"actor_infer": shape, "actor_train": shape, "reference": shape}
    found = list(backend_needs(config.model_copy(update={"actor_infer": engine}), shapes))
    assert [fault.place for fault in found] == ([] if heads is None else ["actor_infer.strategy_args.strategy_name"])
    assert all(f"heads of size {heads};" in fault.problem for fault in found)


@pytest.mark.engines
def test_the_kernel_takes_exactly_the_listed_sizes() -> None:
    import torch
    import vllm._custom_ops as kernels
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    def runs(size: int) -> bool:
        lengths, starts = torch.tensor([4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
        isa = _get_attn_isa(torch.float32, 32, size)
        try:
            kernels.cpu_attn_get_scheduler_metadata(1, 2, 1, size, lengths, torch.float32, starts, True, -1, isa, False)
        except RuntimeError as error:
            assert "Unsupported CPU attention configuration" in str(error)
            return False
        return True

    assert tuple(filter(runs, range(8, 577, 8))) == CPU_HEADS
