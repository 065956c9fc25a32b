"""Reads the keys of verl's SFT trainers that need more than a copy."""

from __future__ import annotations

from roll.convert.draft import Draft
from roll.convert.roles import (
    as_files,
    budget,
    put_adapter,
    put_learner,
    put_names,
    put_rows,
    put_shared_sequences,
    put_trackers,
)
from roll.convert.source import Source
from roll.convert.verl import put_schedule


def build_verl_sft(source: Source, draft: Draft) -> None:
    """Write the experiment of a command line of verl's SFT trainers."""
    draft.put("pipeline", "sft")
    draft.put("pretrain", source.get("model.path", "model.partial_pretrain"))
    targets = source.get("model.target_modules")
    put_adapter(draft, "sft_train", source.count("model.lora_rank"), source.number("model.lora_alpha"), targets)
    shared = source.count("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
    preset = put_shared_sequences(draft, "deepspeed_zero3", shared)
    put_learner(draft, "sft_train", preset, source.devices)
    ranks = max(1, source.gpus // max(1, shared))
    place = ("data.micro_batch_size_per_gpu", "data.micro_batch_size")
    total = source.count("data.train_batch_size")
    put_rows(draft, "sft_train", total, source.count(*place), ranks, "data.train_batch_size")
    if source.get("data.use_dynamic_bsz"):
        budget(draft, "sft_train", source.count("data.max_token_len_per_gpu"), draft.at("max_length"))
    first, second = source.pair("optim.betas")
    draft.put("sft_train.training_args.adam_beta1", first)
    draft.put("sft_train.training_args.adam_beta2", second)
    put_schedule(source, draft, "sft_train", "optim")
    _columns(source, draft)
    _run(source, draft)


def _columns(source: Source, draft: Draft) -> None:
    at = "sft_train.data_args"
    files = source.get("data.train_files")
    if not files:
        draft.note("assumed", "data.train_files", "data/train.parquet")
    draft.put(f"{at}.file_name", as_files(files or "data/train.parquet"))
    if source.get("data.multiturn.enable") or source.trainer == "sft_engine":
        draft.put(f"{at}.messages", source.get("data.multiturn.messages_key", "data.messages_key"))
        draft.put("loss_on", "assistant")
    else:
        for key in ("prompt", "response"):
            column, inner = source.get(f"data.{key}_key"), source.get(f"data.{key}_dict_keys")
            inner = inner if isinstance(inner, list) else []
            draft.put(f"{at}.{key}", ".".join([str(column), *map(str, inner)]))
    every = source.count("trainer.test_freq")
    if every > 0 and (files := source.get("data.val_files")):
        draft.put("eval_steps", every)
        draft.put("validation.data_args", {**draft.at(at), "file_name": as_files(files)})


def _run(source: Source, draft: Draft) -> None:
    put_names(draft, str(source.get("trainer.experiment_name")), source.get("trainer.default_local_dir"))
    put_trackers(draft, "trainer.logger", source.get("trainer.logger"), source.get("trainer.project_name"))
    every = source.get("trainer.save_freq")
    draft.put(
        "save_steps",
        "epoch" if every == "after_each_epoch" else every if isinstance(every, int) and every > 0 else None,
    )
    most = source.count("trainer.total_training_steps")
    draft.put("max_steps", most or None)
    draft.put("sft_train.training_args.num_train_epochs", source.count("trainer.total_epochs"))
