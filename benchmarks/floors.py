"""Measures floors for the parts of a step: the time of the same work in bare vLLM, transformers or DeepSpeed, without
roll.

    python -m benchmarks.floors WORK.json KIND

    KIND: generate             vLLM's own `LLM`, with its engine in a separate process (vLLM's default)
          generate_in_process  the same with the engine in the calling process
          generate_saturated   `LLM` with more requests than it can run at once; seconds, tokens and ended responses of
              each interval
          generate_turns       `LLM` with the recorded episodes of a run, turn by turn; the seconds of each step of the
              run
          forward              log-probs of all tokens, computed by the transformers model
          train                forward, backward and optimizer step
          copy                 a copy of the weights (with adapter sync: of the adapter) within a GPU, and to a second
              GPU
          sft_deepspeed        plain DeepSpeed on the rows of a run of supervised fine-tuning
          sft_train            torch alone on the same rows, on one GPU

Each kind is measured alone, in its own processes. The output is one JSON object: for each figure, the seconds of each
repetition after a warm-up. `benchmarks/step.py` calls this module with a `Work`, `benchmarks/longtail.py` with a
`LongTailWork`, `benchmarks/agents.py` with an `AgentWork`, and `benchmarks/sft.py` with an `SftWork`. Several GPUs
share the work, and a figure is the time until the last one is done. For `generate_saturated` and `generate_turns`, the
figure is that of the first engine while all engines run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.work import AgentWork, LongTailWork, SftWork, TrainingWork, Work, adapter_parameters, parameters
from roll.config.derived.devices import visible_devices

Figures = dict[str, list[float]]
"""Seconds of each repetition, by name of the figure."""
LOG_PROBS: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True}
"""Sampling options that return the log-probs of sampled tokens."""


def generate(work: Work, rank: int, device: str, timer: Any) -> Figures:
    """Measure the generation of all samples of the step: `generate` without log-probs, `generate_log_probs` with them,
    as in a step.
    """
    from vllm import SamplingParams

    engine = bare_engine(work, device)
    prompts, adapter = own_prompts(work, rank, engine), adapter_request(work, rank)
    figures = {}
    for name, kept in (("generate", {}), ("generate_log_probs", LOG_PROBS)):
        sampling = SamplingParams(
            n=work.samples, max_tokens=work.response_tokens, ignore_eos=True, detokenize=False, **kept
        )

        def run(sampling: SamplingParams = sampling) -> None:
            engine.reset_prefix_cache()
            engine.generate(prompts, sampling, lora_request=adapter, use_tqdm=False)

        figures[name] = timer(run)
    # A spawned process runs no exit handlers, so its engine's process would outlive it.
    engine.llm_engine.engine_core.shutdown()
    return figures


def bare_engine(work: Work, device: str) -> Any:
    """Return vLLM's `LLM` with the settings of the work."""
    from vllm import LLM

    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(work.lora_rank, 16)} if work.adapter else {}
    return LLM(
        model=work.model,
        dtype="float32" if work.dtype == "fp32" else "bfloat16",
        max_model_len=work.length,
        max_num_seqs=work.max_num_seqs,
        max_num_batched_tokens=8192,
        enforce_eager=device == "cpu",
        kv_cache_memory_bytes=work.kv_cache_bytes,
        generation_config="vllm",
        disable_log_stats=True,
        **lora,
    )


def own_prompts(work: Work, rank: int, engine: Any) -> list[Any]:
    """Return this engine's share of the prompts in the model's folder, in vLLM's format."""
    from vllm.inputs import TokensPrompt

    rows = [json.loads(line) for line in (Path(work.model) / "prompts.jsonl").read_text().splitlines()]
    tokenizer = engine.get_tokenizer()
    return [TokensPrompt(prompt_token_ids=tokenizer.encode(row["prompt"])) for row in rows[rank :: work.engines]]


def adapter_request(work: Work, rank: int) -> Any:
    """Return the adapter of the requests. None if the engines have merged weights."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, write_adapter(work, rank)) if work.adapter else None


def write_adapter(work: Work, rank: int) -> str:
    """Write a random adapter on every linear layer as a PEFT folder, and return its path."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils.save_and_load import get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(work.scratch) / f"adapter{rank}"
    folder.mkdir()
    settings = LoraConfig(r=work.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work.model)), settings)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[work.dtype]
    shapes = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    save_file(
        {name: 0.01 * torch.randn(shape).to(dtype) for name, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    model.peft_config["default"].save_pretrained(str(folder))
    return str(folder)


def copy(work: Work, rank: int, device: str, timer: Any) -> Figures:
    """Measure one copy of all bytes of a sync: `copy` within a device, and `copy_peer` to a second device if there is
    one.
    """
    import torch

    count = adapter_parameters(work.shape, work.lora_rank) if work.adapter else parameters(work.shape)
    source = torch.zeros(count * (4 if work.dtype == "fp32" else 2), dtype=torch.uint8, device=device)
    places = {"copy": device} | ({"copy_peer": "cuda:1"} if device == "cuda" and torch.cuda.device_count() > 1 else {})
    figures = {}
    for name, place in places.items():
        target = torch.empty_like(source, device=place)
        figures[name] = timer(lambda target=target: target.copy_(source))
    return figures


def run_rank(rank: int, kind: str, work: TrainingWork, ranks: int, barrier: Any, queue: Any) -> None:
    """Run one process of a floor. Rank 0 reports."""
    infer_devices = work.infer_devices if isinstance(work, Work) else ()
    devices = infer_devices if kind.startswith("generate") else work.devices
    if devices:
        used = list(dict.fromkeys((*work.devices, *infer_devices))) if kind == "copy" else [devices[rank]]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(used, os.environ.get("CUDA_VISIBLE_DEVICES"))
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if kind == "generate_in_process":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Imported only now, because an import may search for GPUs and must see those of this rank.
    import torch

    measure = measure_of(kind)
    if not devices:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))

    def timer(function: Callable[[], object]) -> list[float]:
        seconds = []
        for _ in range(work.repetitions + 1):
            barrier.wait()
            begin = time.perf_counter()
            function()
            if devices and not kind.startswith("generate"):
                torch.cuda.synchronize()
            barrier.wait()
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]

    figures = measure(work, rank, "cuda" if devices else "cpu", timer)
    if rank == 0:
        queue.put(figures)


def measure_of(kind: str) -> Callable[[Any, int, str, Any], Figures]:
    """Return the function that measures a floor."""
    if kind.startswith("sft_"):
        from benchmarks import plain_sft

        return {"sft_deepspeed": plain_sft.deepspeed, "sft_train": plain_sft.train}[kind]
    if kind == "generate_saturated":
        from benchmarks.saturated import saturated

        return saturated
    if kind == "generate_turns":
        from benchmarks.turns import turns

        return turns
    from benchmarks import plain

    return {"copy": copy, "forward": plain.forward, "train": plain.train}.get(kind, generate)


def ranks_of(work: TrainingWork, kind: str) -> int:
    """Return the number of processes of a floor."""
    if not isinstance(work, Work) or kind == "train":
        return work.train_ranks
    return {"forward": work.score_ranks, "copy": 1}.get(kind, work.engines)


def main(work: TrainingWork, kind: str) -> Figures:
    """Run the ranks of a floor. Return rank 0's figures."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    ranks = ranks_of(work, kind)
    barrier, queue = context.Barrier(ranks), context.SimpleQueue()
    torch.multiprocessing.spawn(run_rank, (kind, work, ranks, barrier, queue), nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
    figures = queue.get()
    if kind == "generate_in_process":
        return {f"{name}_in_process": seconds for name, seconds in figures.items()}
    return figures


def kind_of_work(kind: str) -> type[TrainingWork]:
    """Return the type of the work of a floor."""
    if kind.startswith("sft_"):
        return SftWork
    return {"generate_saturated": LongTailWork, "generate_turns": AgentWork}.get(kind, Work)


if __name__ == "__main__":
    print("\n" + json.dumps(main(kind_of_work(sys.argv[2]).read(Path(sys.argv[1])), sys.argv[2])))
