"""Writes the model of the tiny world: a Qwen2 of 1.1 million random weights, with a tokenizer of single bytes.

    python examples/tiny/make_model.py FOLDER [--seed 0] [--agent]

FOLDER becomes a Hugging Face model folder like any other. Nothing is downloaded. With --agent the model has room for a conversation, and
its tokenizer a chat template with tool calls, written as Qwen2.5 writes them.
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
"""Number of rows of embedding and head: 256 bytes and three special tokens, padded to a multiple of 64."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Further tokens of an agent, which are text like any other."""
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
"""The tools themselves are not written: there is one, and the model knows it."""


def build_tokenizer(agent: bool = False) -> PreTrainedTokenizerBase:
    """Byte-level BPE without merges: every byte of a text is one token, and no text is unknown."""
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
    """Build the model with random fp32 weights. The same seed gives the same weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=AGENT_POSITIONS if agent else POSITIONS,
        # Wider than the usual 0.02: the head is frozen under LoRA, and small weights would limit the policy's confidence.
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
    """Write model and tokenizer. The folder is renamed when it is complete, and replaces an earlier one."""
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
    print(f"{given.folder}: random weights, a token is a byte, {positions} positions, {template}")
