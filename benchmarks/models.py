"""Writes a model with random weights in a shape of Qwen2.5 or Qwen3 MoE, and random prompts of a fixed number of
tokens.

    python benchmarks/models.py SHAPE FOLDER [--prompts 64] [--prompt-tokens 128] [--end-tokens 1] [--seed 0]
        [--dtype bfloat16]

    SHAPE: tiny | 0.5b | 1.5b | 7b | tiny-moe | 30b-a3b-4

FOLDER becomes an ordinary Hugging Face model folder; FOLDER/prompts.jsonl has the problems of an RLVR run with the
template `raw`. Nothing is downloaded. The weights are drawn on the GPU if there is one. A model with random weights
assigns about the same probability to all tokens: with K `--end-tokens` in a vocabulary of V, a response ends with
probability K / V at each token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

SHAPES: dict[str, dict[str, Any]] = {
    # The size of a head is 64, which FlashAttention supports. The CPU can run this shape too.
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 512,
    }
    | {"vocab_size": 2048, "tie_word_embeddings": False},
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    }
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    }
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    }
    | {"vocab_size": 152064, "tie_word_embeddings": False},
    "tiny-moe": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    | {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    | {"intermediate_size": 512, "vocab_size": 2048, "tie_word_embeddings": False},
    "30b-a3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": False},
}
SHAPES["30b-a3b-4"] = SHAPES["30b-a3b"] | {"num_hidden_layers": 4}
"""Shapes of Qwen2.5-0.5B, 1.5B and 7B, of Qwen3-30B-A3B, whole and with 4 of its layers, and of a tiny model of each
kind.
"""
DENSE = tuple(name for name, shape in SHAPES.items() if "num_experts" not in shape)
"""Shapes without experts, for which the floors can be measured."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258
STANDARD_DEVIATION = 0.02


def build_config(shape: str, dtype: str = "bfloat16") -> Qwen2Config | Qwen3MoeConfig:
    """Return the config of a shape."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    kind = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen2Config
    return kind(
        **SHAPES[shape],
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        initializer_range=STANDARD_DEVIATION,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype=dtype,
    )


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """Return byte-level BPE without merges: every byte of a text is one token.

    The other ids are words that encoding never produces. Decoding the output of a random model thus costs as much as
    with a real vocabulary.
    """
    tokens = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    tokens |= {PAD: PAD_ID, START: START_ID, END: END_ID}
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    tokens |= dict(zip(words, range(END_ID + 1, vocabulary), strict=False))
    return Qwen2Tokenizer(vocab=tokens, merges=[], eos_token=END, pad_token=PAD, additional_special_tokens=[START])


@torch.no_grad()
def build_model(shape: str, seed: int, dtype: str = "bfloat16", end_tokens: int = 1) -> torch.nn.Module:
    """Build a model with normally distributed weights, zero biases and norms of one, on the GPU if there is one."""
    config = build_config(shape, dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(seed)
    model = model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # Its buffer is not in checkpoints.
    model.tie_weights()
    draw_weights(model, generator)
    ends = draw_end_tokens(SHAPES[shape]["vocab_size"], end_tokens, seed)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=PAD_ID)
    return model


def draw_end_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Return ids that end a response: `END`, and random words that occur in no prompt."""
    return [END_ID, *random.Random(seed).sample(range(END_ID + 1, vocabulary), count - 1)]


@torch.no_grad()
def draw_weights(module: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Fill all parameters in place: matrices with normal draws, biases with zeros, norms with ones."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            parameter.normal_(std=STANDARD_DEVIATION, generator=generator)


def draw_prompts(count: int, tokens: int, seed: int) -> list[dict[str, str]]:
    """Return rows of the RLVR pipeline with `tokens` random letters each."""
    generator = random.Random(seed)
    texts = ["".join(generator.choices(string.ascii_lowercase, k=tokens)) for _ in range(count)]
    return [{"prompt": text, "ground_truth": "0", "tag": "benchmark"} for text in texts]


def write(
    folder: Path,
    shape: str,
    prompts: int = 64,
    prompt_tokens: int = 128,
    seed: int = 0,
    dtype: str = "bfloat16",
    end_tokens: int = 1,
) -> None:
    """Write model, tokenizer and prompts. The folder is renamed when it is complete, and replaces an earlier one."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build_model(shape, seed, dtype, end_tokens).save_pretrained(partial, max_shard_size="5GB")  # pyright: ignore[reportCallIssue]
    build_tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(partial)
    rows = draw_prompts(prompts, prompt_tokens, seed)
    (partial / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--end-tokens", type=int, default=1, help="ids that end a response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    disable_progress_bar()
    write(given.folder, given.shape, given.prompts, given.prompt_tokens, given.seed, given.dtype, given.end_tokens)
