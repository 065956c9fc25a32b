"""Models for the engine tests, and the check that no engine process outlives a test module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import limits


def write_small(folder: Path, tied: bool) -> Path:
    """Write a smaller copy of the tiny model: 2 layers, but 1,024 positions. Return its folder."""
    import torch
    from transformers import GenerationConfig, Qwen2ForCausalLM

    from examples.tiny.make_model import END_ID, PAD_ID, build_model, build_tokenizer

    config = build_model(seed=0).config
    config.num_hidden_layers = 2
    config.max_position_embeddings = 1024
    config.tie_word_embeddings = tied
    config.layer_types = ["full_attention"] * 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small model with untied embeddings."""
    return write_small(tmp_path_factory.mktemp("models") / "small", tied=False)


@pytest.fixture(scope="session")
def small_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small model with tied embeddings."""
    return write_small(tmp_path_factory.mktemp("models") / "small_tied", tied=True)


@pytest.fixture(scope="session")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen3 mixture of experts in which each token is routed to 2 of 8 experts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from examples.tiny.make_model import END_ID, PAD_ID, build_model, build_tokenizer

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=build_model(seed=0).config.vocab_size,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.1,  # large enough for the routers to prefer some experts clearly
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    folder = tmp_path_factory.mktemp("models") / "experts"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def with_head(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small model with the nonzero score head of a reward model, so that every layer has a
    gradient.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "with_head"
    folder.mkdir()
    for file in small_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(small_model / "model.safetensors")
    weights["score.weight"] = (
        torch.randn(1, weights["model.norm.weight"].shape[0], generator=torch.Generator().manual_seed(3)) / 4
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session", autouse=True)
def sockets_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put vLLM's sockets into a folder that pytest cleans up, because vLLM does not remove them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path_factory.mktemp("sockets")))
        yield


@pytest.fixture(scope="module")
def as_in_workers() -> Iterator[None]:
    """Set the environment variables that the worker layer sets for an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> Iterator[None]:
    """Use the kernel cache of a run's workers, so that each kernel is compiled once for all tests and reused by the
    next `make test`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "roll" / "torchinductor"))
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Check that every process that a test module starts has ended when the module is done."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = [
        process
        for process in psutil.Process().children(recursive=True)
        if process not in before and not lives_with_python(process)
    ]
    _, left = psutil.wait_procs(started, timeout=limits.END)
    assert not left, f"still running: {left}"


def lives_with_python(process: psutil.Process) -> bool:
    """Return whether this is multiprocessing's resource tracker or fork server, which end only when Python does."""
    try:
        command = " ".join(process.cmdline())
        return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
    except psutil.NoSuchProcess:
        return False
