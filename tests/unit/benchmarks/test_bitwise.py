"""The benchmark of bits: its plain forward is roll's, vLLM's kernels get what they expect, its figures are right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from benchmarks import bitwise, bitwise_kernels, bitwise_trainer
from benchmarks.bitwise_engine import settings
from benchmarks.bitwise_work import ENGINES, NEED_GPU, Difference, Repeat, Work
from roll.data.packing import concatenate
from roll.models import engine_kernels
from roll.models.packed import PackedPolicy, packed_inputs
from roll.types import Ints, Sequences
from tests import limits

LENGTHS = (37, 5, 20)
WORK = Work("model", "bf16", "cpu", 12, 24, 16, 3, 64, 2048, seed=0)


def drawn() -> Sequences:
    """Return packed random sequences of which all but the first three tokens are scored."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 2048, length).astype(np.int32) for length in LENGTHS]
    return concatenate(ids, [np.arange(length) >= 3 for length in LENGTHS])


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedPolicy:
    """Return the policy as the benchmark loads it."""
    folder = tmp_path_factory.mktemp("model")
    bitwise.write_model(folder, "tiny", request.param)
    torch.manual_seed(0)
    policy = bitwise_trainer.load_policy(replace(WORK, model_folder=str(folder), dtype=request.param))
    for name, parameter in policy.named_parameters():
        if name.endswith("bias") or "layernorm" in name:  # zeros and ones would hide mistakes
            parameter.data.normal_(1.0, 0.1)
    return policy


@torch.no_grad()
def test_plain_forward_is_that_of_roll(policy: PackedPolicy) -> None:
    inputs = packed_inputs(drawn(), "cpu")
    found = bitwise_kernels.scored(policy.causal, inputs, bitwise_kernels.PLAIN)
    assert torch.equal(found, policy(inputs)[0])
    assert found.std() > 1, "the logits of the model are spread"


@torch.no_grad()
def test_kernels_of_vllm_get_what_they_expect(policy: PackedPolicy) -> None:
    """These kernels are also built for the CPU. Rounding may differ from torch's."""
    inputs = packed_inputs(drawn(), "cpu")
    plain, causal = bitwise_kernels.PLAIN, policy.causal
    dtype = next(causal.parameters()).dtype
    near: Any = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    model: Any = causal.model
    tokens, norm = sum(LENGTHS), model.layers[0].input_layernorm
    hidden, residual = random(tokens, 128), random(tokens, 128)
    kept = hidden.clone(), residual.clone()
    expected = plain.add_norm(hidden, residual, norm)
    torch.testing.assert_close(bitwise_kernels.engine_add_norm(hidden, residual, norm), expected, **near)
    assert torch.equal(hidden, kept[0]) and torch.equal(residual, kept[1])
    both = random(tokens, 64)
    torch.testing.assert_close(engine_kernels.engine_gated(both), plain.gated(both), **near)
    query, key = random(tokens, 2, 64), random(tokens, 1, 64)
    expected = plain.rotate(query, key, inputs, model.rotary_emb)
    torch.testing.assert_close(bitwise_kernels.engine_rotate(query, key, inputs, model.rotary_emb), expected, **near)


def attend_from_pages(query: Tensor, keys: Tensor, values: Tensor, **given: Any) -> Tensor:
    """Compute what FlashAttention does with pages, for one sequence after the other."""
    out, bounds = [], given["cu_seqlens_q"].tolist()
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        length, table = int(given["seqused_k"][number]), given["block_table"][number].long()
        k, v = (part[table].flatten(0, 1)[:length].transpose(0, 1) for part in (keys, values))
        q = query[begin:end].transpose(0, 1)
        more = {"is_causal": given["causal"], "scale": given["softmax_scale"], "enable_gqa": True}
        out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, **more).transpose(0, 1))
    return torch.cat(out)


def test_pages_hold_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, generator = packed_inputs(drawn(), "cpu"), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 64, generator=generator) for heads in (2, 1, 1))
    vllm = import_module("vllm.v1.attention.backends.fa_utils")
    monkeypatch.setattr(vllm, "flash_attn_varlen_func", attend_from_pages, raising=False)
    monkeypatch.setattr(vllm, "get_flash_attn_version", lambda: 3)
    found = bitwise_kernels.engine_attend(query, key, value, inputs, 0.125)
    torch.testing.assert_close(found, bitwise_kernels.plain_attend(query, key, value, inputs, 0.125))


def test_each_rung_exchanges_one_operation() -> None:
    rungs = [kernels for _, kernels in bitwise_kernels.ladder()]
    assert rungs[0] == bitwise_kernels.PLAIN
    changed = [
        {name for name, kernel in vars(later).items() if kernel is not getattr(earlier, name)}
        for earlier, later in zip(rungs, rungs[1:], strict=False)
    ]
    assert changed == [{"linear"}, {"log_probs"}, {"norm", "add_norm"}, {"gated"}, {"rotate"}, {"attend"}, {"attend"}]
    assert not any(kernel is getattr(bitwise_kernels.PLAIN, name) for name, kernel in vars(rungs[-1]).items())


def test_micro_batches_keep_to_the_budget() -> None:
    prompts, generator = WORK.draw_prompts(), np.random.default_rng(1)
    responses = [generator.integers(0, 2048, 16).astype(np.int32) for _ in prompts]
    assert {len(prompt) for prompt in prompts} <= set(range(12, 25)) and len({len(prompt) for prompt in prompts}) > 1
    parts = list(bitwise_trainer.packed(prompts, responses, budget=64))
    assert len(parts) > 1 and all(len(part.token_ids) <= 64 for part in parts)
    assert np.array_equal(
        np.concatenate([part.token_ids[part.response_mask] for part in parts]), np.concatenate(responses)
    )
    assert [len(part.lengths) for part in bitwise_trainer.packed(prompts, responses, budget=1)] == [1] * 12


def floats(values: Sequence[Any]) -> NDArray[np.float32]:
    """Return log-probs as an array."""
    return np.array(values, np.float32)


def integers(values: Sequence[Any]) -> Ints:
    """Return token ids as an array."""
    return np.array(values, np.int32)


def test_differences_by_hand() -> None:
    engine, trainer = floats([-1, -2, -3, -4]), floats([-1, -2.5, -3, -3.75])
    found = Difference.of(engine, trainer)
    kl = (np.exp(-0.5) - 1 + 0.5 + np.exp(0.25) - 1 - 0.25) / 4
    assert (found.largest, found.mean, found.equal) == (0.5, 0.1875, 0.5) and found.kl == pytest.approx(kl)
    assert Difference.of(engine, engine) == Difference(0, 0, 0, 1)


def test_repeats_count_up_to_the_first_other_token() -> None:
    ids, log_probs = integers([[1, 2, 3], [4, 5, 6]]), floats([[-1, -2, -3], [-4, -5, -6]])
    assert Repeat.of(ids, log_probs, ids, log_probs) == Repeat(1, 1, 0)
    other, others = integers([[1, 2, 3], [4, 9, 6]]), floats([[-1, -2.5, -3], [-4, -9, -9]])
    assert Repeat.of(ids, log_probs, other, others) == Repeat(0.5, 0.75, 0.5)
    assert Repeat.of(ids, log_probs, ids + 1, log_probs) == Repeat(0, 0, 0), "no token is shared"


def test_engines_are_settings_of_roll() -> None:
    assert {name for name in ENGINES if settings(WORK, name).engine.batch_invariant} == set(NEED_GPU)
    on_gpu = settings(replace(WORK, device="cuda"), "fp32-head").engine
    assert on_gpu.engine_args == {"kv_cache_memory_bytes": 2 << 30, "hf_overrides": {"head_dtype": "float32"}}


def printed(table: Any) -> Iterator[list[str]]:
    """Yield the cells of each row of a printed table."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(table)
    yield from (
        [cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines() if "│" in line
    )


def test_tables() -> None:
    repeat = {"same_tokens": 1.0, "same_log_probs": 0.5, "largest": 0.25}
    found = {"today": {"seconds": 2.0, "tokens": 4096, "again": repeat, "alone": repeat | {"same_tokens": 0.125}}}
    assert list(printed(bitwise.engine_table(found))) == [
        ["today", "2,048", "100.00%", "50.00%", "0.25", "12.50%", "50.00%", "0.25"]
    ]
    way = {"difference": {"largest": 0.5, "mean": 0.125, "kl": 0.01, "equal": 0.25}, "seconds": 1.5}
    way |= {"again_equal": 1.0, "alone_equal": 0.75, "alone_largest": 0.1}
    assert list(printed(bitwise.trainer_table({"today": {"one": way, "two": way}}))) == [
        ["today", "one", "0.5", "0.12", "0.01", "25.00%", "1.500", "100.00%", "75.00%"],
        ["", "two", "0.5", "0.12", "0.01", "25.00%", "1.500", "100.00%", "75.00%"],
    ]


def test_operations_that_differ_by_kind() -> None:
    same, other = {"equal": 1.0, "largest": 0.0}, {"equal": 0.5, "largest": 0.25}
    names = ("embedding", "layer 0, queries, keys, values", "layer 0, attention", "layer 1, attention")
    equal = [{"operation": name, **same} for name in names]
    assert bitwise.kinds_that_differ(equal) == {}
    apart = [{"operation": name, **other} for name in names[1:]]
    assert bitwise.kinds_that_differ([*equal[:1], *apart]) == {
        "queries, keys, values": apart[:1],
        "attention": apart[1:],
    }


def command(folder: Path, *more: str) -> list[str]:
    """Return the command of a small measurement."""
    words = [sys.executable, str(Path(bitwise.__file__)), "--engines", "today,invariant", "--scratch", str(folder)]
    words += ["--prompts", "4", "--prompt-tokens", "24", "--response-tokens", "8", "--alone", "2", "--dtype", "fp32"]
    return [*words, "--start-seconds", str(limits.START), *more]


@pytest.mark.engines
@pytest.mark.full
def test_the_command_measures_on_the_cpu(tmp_path: Path) -> None:
    with TemporaryDirectory() as own:
        given: dict[str, Any] = {"env": os.environ | {"TMPDIR": own}, "timeout": limits.RUN}
        done = subprocess.run(command(tmp_path), check=True, capture_output=True, text=True, **given)
        assert os.listdir(own) == [], "sockets and other files of vLLM"
    assert "missing" not in done.stdout, done.stdout
    assert "invariant: left out" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "│ roll's scoring" in line]
    [cells] = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert float(cells[2]) < 1e-3, "in fp32, engine and trainer differ by rounding only"
    assert "operations: " in done.stdout


@pytest.mark.engines
@pytest.mark.full
def test_a_cut_command_keeps_what_it_measured(tmp_path: Path) -> None:
    found, scratch, logs = tmp_path / "found.json", tmp_path / "scratch", tmp_path / "logs"
    scratch.mkdir()
    words = command(scratch, "--json", str(found), "--logs", str(logs))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if "s: today: measured" in line:
                process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    told = json.loads(found.read_text())
    assert told["missing"] == dict.fromkeys(("trainer", "layers"), "the benchmark was cut")
    assert told["engines"]["today"]["tokens"] == 32
    assert {file.name for file in logs.iterdir()} == {"today.log", "trainer.log", "layers.log"}
    assert not [*scratch.iterdir()]
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(scratch) in " ".join(one.info["cmdline"] or ())]
