"""Addresses of stores: what is one, what is wrong with it, and what an `output_dir` in a store stands for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from roll.config.load.stores import addresses, settle_stores
from roll.errors import ConfigError
from roll.pipeline import jobs_of
from roll.stores import address as subject
from roll.stores.address import address_fault, is_address, local_folder, missing_package


@pytest.mark.parametrize("text", ["s3://bucket/run", "gs://bucket/a/b", "file:///shared/run"])
def test_usable_addresses_have_no_fault(text: str) -> None:
    assert is_address(text) and address_fault("output_dir", text) is None


@pytest.mark.parametrize("text", ["./output", "/data/run", "owner/model", "", None, 3])
def test_folders_and_hub_names_are_no_address(text: object) -> None:
    assert not is_address(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("s3://bucket", "malformed"),
        ("s3://", "malformed"),
        ("s3:///run", "malformed"),
        ("s3://bucket/../run", "malformed"),
        ("s3://bucket//run", "malformed"),
        ("file://host/run", "malformed"),
        ("s3://bucket/run?versionId=1", "malformed"),
        ("https://bucket/run", "not_supported"),
        ("s3://id:secret@bucket/run", "not_allowed"),
    ],
)
def test_unusable_addresses_are_refused(text: str, code: str) -> None:
    fault = address_fault("output_dir", text)
    assert fault is not None and fault.code == code and "secret" not in str(fault)


def test_a_store_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    fault = missing_package("output_dir", "gs://bucket/run")
    assert fault is not None and "gcsfs" in fault.problem and "roll[gs]" in fault.remedy
    assert missing_package("output_dir", "file:///run") is None and importlib.util.find_spec("fsspec")


def test_address_of_output_dir_becomes_store_and_folder() -> None:
    values: dict[str, Any] = {"output_dir": "s3://bucket/runs/first/", "pretrain": "owner/model"}
    settle_stores(values)
    assert values["output_store"] == "s3://bucket/runs/first/" and values["output_dir"] == "output/bucket/runs/first"
    assert str(local_folder("file:///shared/run")) == "output/shared/run"


def test_two_stores_of_a_run_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        settle_stores({"output_dir": "s3://bucket/one", "output_store": "s3://bucket/other"})
    assert refused.value.faults[0].code == "exclusive"


def test_addresses_of_models_are_found_in_roles() -> None:
    role = {"model_args": {"model_name_or_path": "s3://models/judge"}, "system_envs": {"HUB": "s3://not/ours"}}
    found = dict(addresses({"pretrain": "gs://models/base", "rewards": {"math": role}}))
    assert found == {"pretrain": "gs://models/base", "rewards.math.model_args.model_name_or_path": "s3://models/judge"}
    with pytest.raises(ConfigError) as refused:
        settle_stores({"rewards": {"math": {"model_args": {"model_name_or_path": "s3://models"}}}})
    assert refused.value.faults[0].place == "rewards.math.model_args.model_name_or_path"


def test_jobs_of_a_sweep_need_their_own_store() -> None:
    words = ["--config-name", "tiny/tiny_warm_up", "--multirun", "seed=1,2", "output_dir=out_${hydra:job.num}"]
    with pytest.raises(ConfigError) as refused:
        jobs_of([*words, "output_store=file:///tmp/one", "dry_run=true"])
    assert [(fault.place, fault.code) for fault in refused.value.faults] == [("output_store", "duplicate")]


def test_model_that_its_store_lacks_is_a_fault() -> None:
    words = ["--config-name", "tiny/tiny_warm_up", "pretrain=file:///no/such/model"]
    with pytest.raises(ConfigError) as refused:
        jobs_of(words)
    assert ("pretrain", "not_found") in {(fault.place, fault.code) for fault in refused.value.faults}
    [(_, plan)] = jobs_of([*words, "dry_run=true"])
    assert any("file:///no/such/model" in warning for warning in plan.warnings)


def test_text_without_scheme_is_no_store() -> None:
    with pytest.raises(ConfigError) as refused:
        jobs_of(["--config-name", "tiny/tiny_warm_up", "output_store=./folder", "dry_run=true"])
    assert [(fault.place, fault.code) for fault in refused.value.faults] == [("output_store", "malformed")]
