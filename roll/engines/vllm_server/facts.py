"""What a vLLM server must be to generate for a run: reads its `/server_info`, and compares. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.errors import RollError
from roll.weight_sync.routes import BACKEND

DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
INFO, HEALTH, VERSION = "/server_info?config_format=json", "/health", "/weight_info"
"""Paths of a server that are asked without changing anything. The first and the last need `VLLM_SERVER_DEV_MODE=1`."""
LOG_PROBS = "processed_logprobs"
"""`--logprobs-mode`: log-probs under the distribution that was sampled from, as the trainer computes them."""


GENERATE = "/inference/v1/generate"
CLOSED = 403
"""Status of `GENERATE` without the flag."""
CLOSED_MISFIT = (f"it does not take tokens ({GENERATE} is disabled)", "start it with --enable-scale-out")


@dataclass(frozen=True)
class Wanted:
    """What the run needs of a server."""

    model: str
    """Hub name, or folder on this host."""
    dtype: str
    """Key of `DTYPES`."""
    max_model_len: int
    max_num_seqs: int


def misfits(info: Mapping[str, Any], wanted: Wanted) -> list[tuple[str, str]]:
    """Return what keeps a server from generating for the run, as pairs of problem and remedy.

    Args:
        info: body of `/server_info?config_format=json`.

    Raises:
        RollError: the body has another form than that of vLLM 0.32.
    """
    try:
        return list(_misfits(info["vllm_config"], wanted))
    except (KeyError, TypeError, AttributeError) as error:
        raise RollError(f"{INFO} is not that of vLLM 0.32: {type(error).__name__} {error}") from error


def seed_of(info: Mapping[str, Any]) -> int | None:
    """Return the `--seed` of a server, from its `/server_info`; None if the body has another form."""
    try:
        return info["vllm_config"]["model_config"]["seed"]
    except (KeyError, TypeError):
        return None


def _misfits(config: Mapping[str, Any], wanted: Wanted) -> Iterator[tuple[str, str]]:
    model, sizes, transfer = config["model_config"], config["scheduler_config"], config["weight_transfer_config"]
    if (backend := transfer and transfer["backend"]) != BACKEND:
        took = f"it takes no weights of roll (weight-transfer backend: {backend or 'none'})"
        yield took, f"""start it with --weight-transfer-config '{{"backend": "{BACKEND}"}}', where roll is installed"""
    for key in ("model", "tokenizer"):
        if not _same_model(model[key], wanted.model):
            yield f"its {key} is {model[key]}, not {wanted.model}", f"start it with the {key} {wanted.model}"
    if model["dtype"] != DTYPES[wanted.dtype]:
        name = DTYPES[wanted.dtype].removeprefix("torch.")
        yield f"its dtype is {model['dtype']}, not {name}", f"start it with --dtype {name}, or set model_args.dtype"
    if model["quantization"] is not None:
        yield f"its weights are quantized ({model['quantization']})", "start it without --quantization"
    for flag, found, least in (
        ("max-model-len", model["max_model_len"], wanted.max_model_len),
        ("max-num-seqs", sizes["max_num_seqs"], wanted.max_num_seqs),
    ):
        if found < least:
            yield f"its --{flag} is {found}, less than the {least} of the run", f"start it with --{flag} {least}"
    for flag, value in (("logprobs-mode", LOG_PROBS), ("generation-config", "vllm")):
        if (found := model[flag.replace("-", "_")]) != value:
            yield f"its --{flag} is {found}", f"start it with --{flag} {value}"
    if config["speculative_config"] is not None:
        yield "it decodes speculatively, with a draft that gets no weights", "start it without --speculative-config"
    if config["parallel_config"]["data_parallel_size"] > 1:
        yield "it has several engines (--data-parallel-size)", "start one server for each engine"
    if config["device_config"]["device"] == "cpu" and sizes["enable_chunked_prefill"]:
        yield (
            "it prefills in chunks, and on the CPU vLLM 0.32 then crashes at a seeded sample",
            "start it with --no-enable-chunked-prefill, and --max-num-batched-tokens of at least --max-model-len",
        )


def _same_model(found: str, wanted: str) -> bool:
    return found == wanted or (os.path.isdir(found) and os.path.realpath(found) == os.path.realpath(wanted))
