"""The benchmark of supervised fine-tuning: its texts, the loops without roll that it compares with (floors), and its
arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from benchmarks import models, plain_sft
from benchmarks.figures import PEAK
from benchmarks.sft import SftResult, draw_texts, overrides, packed_rows
from benchmarks.work import SftWork, parameters
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.types import Sequences

CONFIG = Path(__file__).parents[3] / "benchmarks" / "config"
ROW = 64


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> SftWork:
    """Return a workload of two rows of text for the tiny model, with the `config.yaml` that a run writes before it
    starts.
    """
    scratch = tmp_path_factory.mktemp("sft")
    work = SftWork(
        model=str(scratch / "model"),
        shape=models.SHAPES["tiny"],
        dtype="fp32",
        devices=(),
        train_ranks=1,
        token_budget=ROW,
        lora_rank=0,
        stage=1,
        repetitions=1,
        scratch=str(scratch),
        checkpointed=2,
    )
    models.write(Path(work.model), "tiny", prompts=1, prompt_tokens=1, dtype="float32")
    texts = draw_texts(2, ROW, seed=0)
    (Path(work.model) / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    loaded: list[Config] = []
    words = [f"{key}={value}" for key, value in overrides(work, 4, len(texts)).items()]
    command = ["--config-dir", str(CONFIG), "--config-name", "sft", *words]
    compose(command, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    (scratch / "run").mkdir()
    (scratch / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(loaded[0].model_dump(mode="json"))))
    return work


def test_texts_with_their_ends_fill_the_rows() -> None:
    lengths = [len(text) + 1 for text in draw_texts(64, 4096, seed=0)]
    assert len(lengths) == 256 and sum(lengths) == 64 * 4096
    assert min(lengths) > 0.05 * 4096 and max(lengths) < 0.5 * 4096
    assert len(set(lengths)) > 200


def test_sft_steps_learn_all_tokens_but_the_first(work: SftWork) -> None:
    config = plain_sft.run_config(work)
    texts = sorted(
        models.build_tokenizer(2048)(text)["input_ids"] + [models.END_ID] for text in draw_texts(2, ROW, seed=0)
    )
    steps = plain_sft.batches(config, 1)
    for (rank,) in (next(steps), next(steps)):
        found = [part.batch.sequences for part in rank]
        assert sorted(text.tolist() for sequences in found for text in split(sequences)) == texts
        assert sum(int(sequences.response_mask.sum()) for sequences in found) == 2 * ROW - len(texts)
        assert len(rank) == packed_rows(work, draw_texts(2, ROW, seed=0))
        assert max(len(sequences.token_ids) for sequences in found) <= ROW


def split(sequences: Sequences) -> list[torch.Tensor]:
    """Return the token ids of each sequence."""
    return list(torch.from_numpy(sequences.token_ids).split(sequences.lengths.tolist()))


def test_bare_loop_starts_at_text_losses_and_improves(work: SftWork) -> None:
    def timer(function: Callable[[], object]) -> list[float]:
        for _ in range(work.repetitions + 1):
            function()
        return [1.0] * work.repetitions

    figures = plain_sft.train(work, 0, "cpu", timer)
    model = AutoModelForCausalLM.from_pretrained(work.model)
    total, learnt = 0.0, 0
    for text in draw_texts(2, ROW, seed=0):
        ids = torch.tensor([models.build_tokenizer(2048)(text)["input_ids"] + [models.END_ID]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None]).sum())
        learnt += ids.shape[1] - 1
    assert figures["sft_train_loss"][0] == pytest.approx(total / learnt, abs=1e-5)
    assert figures["sft_train_loss"][1] < figures["sft_train_loss"][0]


def test_sft_table_compares_medians_after_warm_up(work: SftWork) -> None:
    def line(seconds: float) -> dict[str, float]:
        return {
            "time/step": seconds,
            "time/train": seconds - 0.1,
            "throughput/tokens_per_second": 1000 / seconds,
            "sft/loss": 7.5,
        }

    floors = {"sft_deepspeed": [2.0, 1.9, 9.0], "sft_deepspeed_loss": [7.5, 7.25, 7.5, 7.5]}
    lines = [line(seconds) for seconds in (50.0, 8.0, 4.0, 2.2, 2.1, 3.0)]
    result = SftResult(work, {}, 8, 2, lines, floors)
    assert result.tokens == 1000
    assert result.seconds == {"step": 2.2, "step_train": pytest.approx(2.1), "deepspeed": 2.0}
    assert result.ratio == pytest.approx(1.1)
    assert result.loss_difference == {"deepspeed": 0.25}
    assert result.mfu(2.0) is None, "no GPU"


def test_mfu_is_of_all_gpus(work: SftWork) -> None:
    line = {"time/step": 2.0, "throughput/tokens_per_second": 500.0}
    on_gpus = replace(work, devices=(0, 1, 2, 3), train_ranks=4)
    share = 6 * parameters(models.SHAPES["tiny"]) * 1000 / (2.0 * 4 * PEAK)
    assert SftResult(on_gpus, {}, 8, 2, [line] * 4, {}).mfu(2.0) == pytest.approx(share)
    adapted = replace(on_gpus, lora_rank=8)
    assert SftResult(adapted, {}, 8, 2, [line] * 4, {}).mfu(2.0) == pytest.approx(share * 4 / 6)
