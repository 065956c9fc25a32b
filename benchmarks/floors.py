"""What the bare engines need for one step's work, each measured alone in a process of its own, without roll around them.

    python benchmarks/floors.py WORK.json KIND     KIND: generate | forward | train

prints one JSON object with the seconds of each repetition after a warm-up. `benchmarks/step.py` calls it; the work
file says which model, how many prompts, samples and tokens, and how the engines are set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REPETITIONS = 5


def generate(work: dict[str, Any]) -> list[float]:
    """vLLM's own offline `LLM`: every sample of the step at once, log-probs kept as the step keeps them, no adapter sync."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    adapter = work["adapter"]
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(work["lora_rank"], 16)} if adapter else {}
    engine = LLM(
        model=work["model"],
        dtype="float32",
        max_model_len=work["prompt_tokens"] + work["response_tokens"],
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        kv_cache_memory_bytes=int(work["kv_cache_gib"] * 2**30),
        generation_config="vllm",
        disable_log_stats=True,
        **lora,
    )
    sampling = SamplingParams(
        n=work["samples"], max_tokens=work["response_tokens"], ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in work["prompts"]]
    request = LoRARequest("policy", 1, adapter) if adapter else None
    seconds = []
    for _ in range(REPETITIONS + 1):
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def packed_rows(work: dict[str, Any], share: int, shares: int) -> list[dict[str, Any]]:
    """This share's sequences, packed into rows of at most the token budget, as keyword arguments of a transformers model."""
    import torch

    length = work["prompt_tokens"] + work["response_tokens"]
    count = len(work["prompts"]) * work["samples"] // shares
    per_row = max(1, work["token_budget"] // length)
    generator = torch.Generator().manual_seed(share)
    rows = []
    for start in range(0, count, per_row):
        size = min(per_row, count - start)
        offsets = torch.arange(0, (size + 1) * length, length, dtype=torch.int32)
        rows.append(
            {
                "input_ids": torch.randint(0, work["vocabulary"], (1, size * length), generator=generator),
                "position_ids": torch.arange(length).repeat(size)[None],
                "use_cache": False,
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": length,
                "max_length_k": length,
            }
        )
    return rows


def packed_model(work: dict[str, Any]) -> Any:
    """The transformers model itself, with attention that keeps packed sequences apart."""
    import torch
    from transformers import AutoModelForCausalLM

    from roll.models.attention import register

    return AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, attn_implementation=register())


def token_log_probs(model: Any, row: dict[str, Any]) -> Any:
    """Log-probs of all tokens but the first, [T - 1], from whole logits."""
    import torch

    logits = model(**row).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, row["input_ids"][0, 1:, None])[:, 0]


def forward(work: dict[str, Any]) -> list[float]:
    """One forward pass over every sequence in one process with all cores."""
    import torch

    model = packed_model(work).eval()
    rows = packed_rows(work, 0, 1)
    seconds = []
    with torch.no_grad():
        for _ in range(REPETITIONS + 1):
            begin = time.perf_counter()
            for row in rows:
                token_log_probs(model, row)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def train(work: dict[str, Any]) -> list[float]:
    """DeepSpeed by hand on the configured ranks and stage: forward, backward and optimizer step of every update."""
    import torch.multiprocessing

    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_train_rank, (work, queue), nprocs=work["ranks"])  # pyright: ignore[reportPrivateImportUsage]
    return queue.get()


def _train_rank(rank: int, work: dict[str, Any], queue: Any) -> None:
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(work["ranks"]), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // work["ranks"]))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": work["stage"]},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    place = {"init_method": f"file://{work['rendezvous']}", "rank": rank, "world_size": work["ranks"]}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **place)
    sharded = HfDeepSpeedConfig(config) if work["stage"] == 3 else None
    model = packed_model(work)
    if work["lora_rank"]:
        model = get_peft_model(model, LoraConfig(r=work["lora_rank"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    rows = packed_rows(work, rank, work["ranks"])
    per_update = max(1, len(rows) // work["updates"])
    seconds = []
    for _ in range(REPETITIONS + 1):
        begin = time.perf_counter()
        for start in range(0, len(rows), per_update):
            for row in rows[start : start + per_update]:
                engine.backward(-token_log_probs(engine, row).mean())
            engine.step()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        queue.put(seconds[1:])
    engine.destroy()
    torch.distributed.destroy_process_group()
    del sharded


FLOORS = {"generate": generate, "forward": forward, "train": train}

if __name__ == "__main__":
    seconds = FLOORS[sys.argv[2]](json.loads(Path(sys.argv[1]).read_text()))
    print("\n" + json.dumps({"seconds": seconds}))
