"""Models in stores: fetched once to each host, compared with their digests, and never mixed with another version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.stores.models import CACHE, described_model, known_model, local_model, pinned_model
from roll.stores.store import Store, StoreError

FILES = {"config.json": "{}", "tokenizer.json": "[]", "model.safetensors": "w" * 1000}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a model in a folder, with an empty cache on this host."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    folder = tmp_path / "store" / "model"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    yield folder.as_uri()
    pinned_model.cache_clear()


def test_a_plan_fetches_all_but_weights(model: str) -> None:
    folder = described_model(model)
    assert {path.name for path in folder.glob("*.*") if not path.name.startswith(".")} == FILES.keys() - {
        "model.safetensors"
    }
    assert known_model(model) == folder == Path(local_model(model))
    assert (folder / "model.safetensors").read_text() == FILES["model.safetensors"]


def test_a_model_is_fetched_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda store, name, file: (fetched.append(name), get(store, name, file))[1])
    assert local_model(model) == local_model(pinned_model(model)) and sorted(fetched) == sorted(FILES)
    damaged = Path(local_model(model)) / "model.safetensors"
    damaged.write_text("x" * 1000)
    assert local_model(model) == str(damaged.parent) and damaged.read_text() == FILES["model.safetensors"]
    assert fetched[len(FILES) :] == ["model.safetensors"]


def test_a_changed_model_is_another_version(model: str) -> None:
    pinned, before = pinned_model(model), local_model(model)
    (Path(model.removeprefix("file://")) / "config.json").write_text('{"changed": 1}')
    assert local_model(pinned) == before, "processes of the same run load the version that it started with"
    shutil.rmtree(before)
    with pytest.raises(StoreError) as refused:
        local_model(pinned)
    assert refused.value.code == "changed"
    pinned_model.cache_clear()
    assert local_model(model) != before


def test_unreachable_store_leaves_the_copy(model: str, caplog: pytest.LogCaptureFixture) -> None:
    copy = local_model(model)
    pinned_model.cache_clear()

    def fails(store: Store) -> dict[str, tuple[int, str]]:
        raise StoreError(store.address, "no network", "plug it in", "failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "marks", fails)
        assert local_model(model) == copy and "no network" in caplog.text


def test_a_prefix_without_files_is_refused(model: str) -> None:
    with pytest.raises(StoreError) as refused:
        local_model(f"{model}-of-another-name")
    assert refused.value.code == "not_found"
    assert local_model("owner/model") == "owner/model", "names of the Hub are left to transformers"
