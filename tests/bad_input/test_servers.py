"""Servers outside the run that cannot be used: exit status 2 before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.errors import Fault, FaultCode
from tests.faults import assert_fault
from tests.unit.strategies.stub_server import StubServer, stub_server

CHOSEN = ("actor_infer.strategy_args.strategy_name=vllm_server", "~actor_infer.strategy_args.strategy_config")
STRATEGY = "actor_infer.strategy_args"
URLS = f"{STRATEGY}.strategy_config.base_urls"
NOBODY = "http://127.0.0.1:9"
Judge = Callable[..., tuple[Fault, ...]]


def at(*urls: str) -> tuple[str, ...]:
    """Return the overrides that let servers at these addresses generate."""
    return (*CHOSEN, f"+{STRATEGY}.strategy_config={{base_urls: [{', '.join(map(repr, urls))}], max_num_seqs: 8}}")


@pytest.fixture
def stub(folder: Path) -> Iterator[StubServer]:
    with stub_server(str(folder / "model")) as served:
        yield served


@pytest.mark.parametrize(
    ("overrides", "place", "code", "value", "remedy"),
    [
        (CHOSEN, URLS, "empty", "[]", "127.0.0.1:8001"),
        (at("127.0.0.1:8001"), URLS, "malformed", "127.0.0.1:8001", "http://"),
        (at("http://127.0.0.1:8001/v1"), URLS, "malformed", "/v1", "http://"),
        (at(NOBODY, NOBODY), URLS, "duplicate", NOBODY, "once"),
        (at("http://192.0.2.1:8001"), URLS, "not_supported", "not on this host", "one host"),
        (at(NOBODY), URLS, "failed", NOBODY, "docs/running.md"),
        ((*at(NOBODY), "actor_infer.world_size=2"), "actor_infer.world_size", "no_effect", "2", "remove"),
        (
            (*at(NOBODY), "actor_train.model_args.lora_target=all-linear"),
            "weight_sync.lora",
            "not_supported",
            "whole weights only",
            "merged",
        ),
    ],
)
def test_keys_of_servers_are_refused(
    faults_of: Judge, overrides: tuple[str, ...], place: str, code: FaultCode, value: str, remedy: str
) -> None:
    assert_fault(faults_of(*overrides), place, code, value, remedy)


@pytest.mark.parametrize(
    ("block", "key", "found", "remedy"),
    [
        ("model_config", "model", "/models/other", "start it with the model"),
        ("model_config", "dtype", "torch.bfloat16", "--dtype float32"),
        ("model_config", "max_model_len", 20, "--max-model-len 24"),
        ("weight_transfer_config", "backend", "nccl", "--weight-transfer-config"),
    ],
)
def test_servers_that_do_not_fit_are_refused(
    faults_of: Judge, stub: StubServer, block: str, key: str, found: Any, remedy: str
) -> None:
    stub.info["vllm_config"][block][key] = found
    assert_fault(faults_of(*at(stub.url, NOBODY)), URLS, "unfit", f"{stub.url}", remedy)
    assert not stub.asked, "a check must not change the server"


@pytest.mark.parametrize(("status", "remedy"), [(404, "VLLM_SERVER_DEV_MODE=1"), (401, "--api-key")])
def test_servers_that_tell_nothing_are_refused(faults_of: Judge, stub: StubServer, status: int, remedy: str) -> None:
    stub.answers["/server_info"] = (status, {})
    assert_fault(faults_of(*at(stub.url)), URLS, "unfit", stub.url, remedy)


def test_server_without_tokens_is_refused(faults_of: Judge, stub: StubServer) -> None:
    stub.takes_tokens = False
    assert_fault(faults_of(*at(stub.url)), URLS, "unfit", stub.url, "--enable-scale-out")


def test_servers_of_the_same_noise_are_refused(faults_of: Judge, stub: StubServer, folder: Path) -> None:
    with stub_server(str(folder / "model")) as other:
        assert_fault(faults_of(*at(stub.url, other.url)), URLS, "duplicate", "--seed, 0", "another --seed")
        assert not faults_of(*at(stub.url, other.url), "actor_infer.generating_args.seeded=true")
        other.info["vllm_config"]["model_config"]["seed"] = 1
        assert not faults_of(*at(stub.url, other.url))


def test_one_server_of_two_is_enough(faults_of: Judge, stub: StubServer) -> None:
    assert not faults_of(*at(stub.url, NOBODY))


def test_dry_run_only_warns_of_absent_servers(faults_of: Judge) -> None:
    assert not faults_of(*at(NOBODY), "dry_run=true")
