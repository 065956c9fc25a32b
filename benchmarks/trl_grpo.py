"""Trains like a recipe of roll with TRL's GRPOTrainer (its engine on the same GPU), and measures it in the same way.

`benchmarks/beside_trl.py` starts it with the path of a JSON file: `python -m benchmarks.trl_grpo WORK`. It needs TRL.
Each validation is a line of JSON on stdout: `{"step": ..., "accuracy": ..., "training_seconds": ...}`. The seconds of
training begin with the first step and leave out validations.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from roll.rewards.functions.last_number import last_of


@dataclass(frozen=True)
class Work:
    """What is trained."""

    model: str
    """Folder of the model."""
    train: str
    """File with the training rows: prompt and ground_truth."""
    validation: str
    """File with the held-out rows."""
    seed: int
    steps: int
    eval_steps: int
    prompts: int
    """Prompts of a step."""
    samples: int
    """Responses to a prompt."""
    micro_batch: int
    """Responses of a micro-batch."""
    prompt_length: int
    response_length: int
    learning_rate: float
    gpu_memory_utilization: float
    scratch: str


def score(text: str, answer: str) -> float:
    """Return 1 if the last number of a response is the answer, else 0."""
    return float(last_of(text) == last_of(answer))


def reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Score responses, as TRL calls a reward function."""
    return [score(turns[0]["content"], answer) for turns, answer in zip(completions, ground_truth, strict=True)]


def rows_of(file: str) -> list[dict[str, Any]]:
    """Read rows, with the prompt as messages."""
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


def trainer_of(work: Work) -> Any:
    """Return TRL's trainer, with weights and Adam in fp32 and computation in bf16, as TRL does by default."""
    trl, datasets = import_module("trl"), import_module("datasets")
    settings = trl.GRPOConfig(
        output_dir=f"{work.scratch}/trl",
        max_steps=work.steps,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.prompts * work.samples // work.micro_batch,
        num_generations=work.samples,
        max_completion_length=work.response_length,
        temperature=1.0,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        bf16=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=work.gpu_memory_utilization,
        vllm_max_model_length=work.prompt_length + work.response_length,
        seed=work.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_list(rows_of(work.train)).select_columns(["prompt", "ground_truth"])
    return trl.GRPOTrainer(model=work.model, reward_funcs=reward, args=settings, train_dataset=rows)


def validate(trainer: Any, rows: list[dict[str, Any]], work: Work) -> float:
    """Return the greedy accuracy of the engine's weights."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=work.response_length)
    said = trainer.vllm_generation.llm.chat([row["prompt"] for row in rows], greedy, use_tqdm=False)
    right = [score(one.outputs[0].text, row["ground_truth"]) for one, row in zip(said, rows, strict=True)]
    return sum(right) / len(right)


def main() -> None:
    """Train."""
    import torch
    from transformers import TrainerCallback

    work = Work(**json.loads(Path(sys.argv[1]).read_text()))
    trainer, rows = trainer_of(work), rows_of(work.validation)

    class Watch(TrainerCallback):
        """Measures the steps, and validates between them."""

        seconds, begin = 0.0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, settings: Any, state: Any, control: Any, **_: Any) -> None:
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self.begin
            if state.global_step % work.eval_steps == 0:
                trainer.vllm_generation.sync_weights()
                said(state.global_step, self.seconds)

    def said(step: int, seconds: float) -> None:
        line = {"step": step, "accuracy": validate(trainer, rows, work), "training_seconds": seconds}
        print(json.dumps(line), flush=True)

    said(0, 0.0)
    trainer.add_callback(Watch())
    trainer.train()


if __name__ == "__main__":
    main()
