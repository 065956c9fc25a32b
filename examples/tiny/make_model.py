"""Writes the model of the tiny examples: a Qwen2 with 1.1 million random weights, and a tokenizer whose tokens are
single bytes.

    python examples/tiny/make_model.py FOLDER [--seed 0] [--agent]

FOLDER becomes an ordinary Hugging Face model folder. Nothing is downloaded. With --agent the model has a longer
context, and its tokenizer has a chat template with tool calls in the format of Qwen2.5.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 320
"""Number of rows of the embedding and the head: 256 bytes and three special tokens, padded to a multiple of 64."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Additional tokens of the agent's tokenizer. They are not special tokens."""
POSITIONS, AGENT_POSITIONS = 64, 384
AGENT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role -}}
{%- if message.content -%}{{- '\\n' + message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Chat template of the agent. It does not list the tools, because there is only one, which the model learns in the
warm-up.
"""


def build_tokenizer(agent: bool = False) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer without merges: every byte is one token, so that it can encode any text."""
    vocabulary = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {PAD: PAD_ID, START: START_ID, END: END_ID}
    special = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": [START]}
    if not agent:
        return Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=POSITIONS, **special)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=AGENT_POSITIONS, **special)
    tokenizer.add_tokens(list(TOOL_TOKENS))
    tokenizer.chat_template = AGENT_TEMPLATE
    return tokenizer


def build_model(seed: int, agent: bool = False) -> Qwen2ForCausalLM:
    """Return the model with random fp32 weights. The same seed gives the same weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=AGENT_POSITIONS if agent else POSITIONS,
        # Larger than the usual 0.02: LoRA freezes the head, and with small weights the policy could not become
        # confident.
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    return model


def write_model(folder: Path, seed: int, agent: bool = False) -> None:
    """Write the model and the tokenizer into a new folder, which replaces `folder` once it is complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build_model(seed, agent).save_pretrained(partial)
    build_tokenizer(agent).save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent", action="store_true", help="for conversations with tool calls")
    given = parser.parse_args()
    disable_progress_bar()
    write_model(given.folder, given.seed, given.agent)
    template = "with a chat template" if given.agent else "without a chat template (template: raw)"
    positions = AGENT_POSITIONS if given.agent else POSITIONS
    print(f"{given.folder}: random weights, one token per byte, {positions} positions, {template}")
