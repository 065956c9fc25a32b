"""Measures the effect of bf16 alone on the log-probs of a random model, with transformers' layers only.

    python benchmarks/rounding.py [--model tiny|0.5b|1.5b|7b] [--tokens 256]

A row of random tokens is passed through the layers in fp32, in bf16 with torch's fused attention, and in bf16 with
plain attention. Each layer is drawn when it is needed and dropped afterwards, so 7B needs only 9 GiB of host memory; it
takes two minutes on two cores. As with a policy, each log-prob is that of a token drawn from the distribution at its
position. Prints the mean absolute differences in nats: two engines that compute in bf16 cannot be expected to agree
more closely.
"""

from __future__ import annotations

import argparse
from itertools import combinations

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from benchmarks.models import DENSE, STANDARD_DEVIATION, build_config, draw_weights

WAYS = {
    "fp32": (torch.float32, "sdpa"),
    "bf16": (torch.bfloat16, "sdpa"),
    "bf16, plain attention": (torch.bfloat16, "eager"),
}
"""Precision and attention kernel of each way to compute."""


def main() -> None:
    """Print a line for each pair of `WAYS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DENSE, default="tiny")
    parser.add_argument("--tokens", type=int, default=256, help="number of tokens in the row")
    options = parser.parse_args()
    for (one, other), difference in differences(options.model, options.tokens, seed=0).items():
        print(f"{options.model}, {options.tokens} tokens, {one} and {other}: {difference:.4f}")


@torch.no_grad()
def differences(model: str, tokens: int, seed: int) -> dict[tuple[str, str], float]:
    """Return mean absolute differences of the log-probs in nats, for each pair of `WAYS`. `model`: one of `DENSE`."""
    config = build_config(model)
    assert isinstance(config, Qwen2Config), model
    torch.manual_seed(seed)
    embedding = drawn(config)
    row = random_row(config, tokens)
    states = {way: embedding[row].to(dtype) for way, (dtype, _) in WAYS.items()}
    for number in range(config.num_hidden_layers):
        states = one_layer(config, number, states)
    output = embedding if config.tie_word_embeddings else drawn(config)
    logits = {way: logits_of(config, output, state) for way, state in states.items()}
    said = torch.multinomial(logits["fp32"].softmax(-1), 1)
    log_probs = {way: one.log_softmax(-1).gather(1, said) for way, one in logits.items()}
    return {
        (one, other): float((log_probs[one] - log_probs[other]).abs().mean()) for one, other in combinations(WAYS, 2)
    }


def random_row(config: Qwen2Config, tokens: int) -> torch.Tensor:
    """Return random token ids [1, T]."""
    return torch.randint(0, config.vocab_size, (1, tokens))


def drawn(config: Qwen2Config) -> torch.Tensor:
    """Return a random embedding or output matrix [vocabulary, width]."""
    return torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16).normal_(std=STANDARD_DEVIATION)


def one_layer(config: Qwen2Config, number: int, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the states, each [1, T, width], after a layer with random weights."""
    with torch.device("meta"):
        layer = Qwen2DecoderLayer(config, number).to(torch.bfloat16)
    layer = layer.to_empty(device="cpu")
    draw_weights(layer)
    tokens = next(iter(states.values())).shape[1]
    causal = torch.full((1, 1, tokens, tokens), float("-inf")).triu(1)
    angles = Qwen2RotaryEmbedding(config)(torch.empty(0, dtype=torch.float32), torch.arange(tokens)[None])
    behind = {}
    for way, (dtype, kernel) in WAYS.items():
        config._attn_implementation = kernel  # The layer reads it when it runs.
        cos_sin = tuple(angle.to(dtype) for angle in angles)
        behind[way] = layer.to(dtype)(states[way], attention_mask=causal.to(dtype), position_embeddings=cos_sin)
    return behind


def logits_of(config: Qwen2Config, output: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return logits [T, vocabulary], computed in the state's precision and converted to fp32."""
    norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps).to(state.dtype)
    return (norm(state)[0] @ output.to(state.dtype).T).float()


if __name__ == "__main__":
    main()
