"""Set up all tests: the tiny models, the markers of tests that need an engine or a GPU, Hypothesis profiles and Ray's
deadlines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import limits

# By default every run draws the same examples, so that results are reproducible; `--hypothesis-profile=random` draws
# others.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("fixed")
# The variables are set when this file is imported, because Ray and torch read some of them when they are imported.
os.environ |= limits.RAY
# On a machine that others use as well, a process with a thread per core mostly spins until its other threads get a
# core. Roles have threads as their configuration says, not as this process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ENGINES = Path(__file__).parent / "engines"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in `tests/engines` with `engines`, and skip tests marked `gpu` if there is no CUDA device."""
    for item in items:
        if item.path.is_relative_to(ENGINES):
            item.add_marker(pytest.mark.engines)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, but torch cannot use any on this machine"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen2 with random fp32 weights, untied embeddings and a byte tokenizer."""
    from examples.tiny.make_model import write_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of the same shape with tied embeddings."""
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
