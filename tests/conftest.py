"""What all tests share: a tiny model, which tests a machine can run, how Hypothesis draws its examples, and Ray's deadlines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import limits

# By default the same examples in every run, so that a test that passed passes again; `--hypothesis-profile=random` draws others.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")
# Here, as Ray reads some of them when it is imported.
os.environ |= limits.RAY

ENGINES = Path(__file__).parent / "engines"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands in `tests/engines`, and skip tests marked `gpu` where there is no CUDA device."""
    for item in items:
        if item.path.is_relative_to(ENGINES):
            item.add_marker(pytest.mark.engines)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and this machine has none that torch can use"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2 of random fp32 weights with a byte tokenizer; embedding and head are two tensors."""
    from examples.tiny.make_model import write_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with one tensor for embedding and head."""
    import torch
    from transformers import Qwen2ForCausalLM

    from examples.tiny.make_model import build_model, build_tokenizer

    config = build_model(seed=0).config
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(config)
    folder = tmp_path_factory.mktemp("models") / "tied"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
