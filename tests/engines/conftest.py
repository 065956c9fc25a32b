"""The model of the engines' tests, and the promise that no engine outlives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import limits


def write_small(folder: Path, tied: bool) -> Path:
    """The tiny model with half its layers and room for long sequences."""
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
    """Two tensors for embedding and head."""
    return write_small(tmp_path_factory.mktemp("models") / "small", tied=False)


@pytest.fixture(scope="session")
def small_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor for both."""
    return write_small(tmp_path_factory.mktemp("models") / "small_tied", tied=True)


@pytest.fixture(scope="session")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of Qwen3's kind: each token runs through 2 of 8."""
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
        initializer_range=0.1,  # the routers then differ clearly among the experts
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
    """The small model with a head that is not 0, as a reward model has it: every layer then has a gradient."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "with_head"
    folder.mkdir()
    for file in small_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(small_model / "model.safetensors")
    weights["score.weight"] = torch.randn(1, weights["model.norm.weight"].shape[0], generator=torch.Generator().manual_seed(3)) / 4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session", autouse=True)
def sockets_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM does not remove its sockets; they go where pytest cleans up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path_factory.mktemp("sockets")))
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> Iterator[None]:
    """They lie where a run's workers keep them, so that each is compiled once for all tests, and not again in the next `make test`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "roll" / "torchinductor"))
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Every process that a module starts ends with it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = [process for process in psutil.Process().children(recursive=True) if process not in before and not lives_with_python(process)]
    _, left = psutil.wait_procs(started, timeout=limits.END)
    assert not left, f"still running: {left}"


def lives_with_python(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's own, which ends when Python does."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
