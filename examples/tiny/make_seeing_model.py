"""Writes the model of the tiny examples with pictures: random weights, in the shape of Qwen2.5-VL, Qwen3-VL, Qwen3.5,
SmolVLM, Idefics3 or Gemma 3.

    python examples/tiny/make_seeing_model.py FOLDER [--family qwen2_5_vl] [--seed 0] [--tools]

FOLDER becomes an ordinary Hugging Face model folder, with an image processor. Nothing is downloaded. The tokens are
single bytes, as in `make_model.py`, and the marks of the family.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 320
"""Number of rows of the embedding and the head: 256 bytes, three special tokens and the marks of a family."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 256, 257, 258
TILED = ("smolvlm", "idefics3")
"""Families that see a picture in tiles."""
SQUARE = ("gemma3",)
"""Families that see a picture as a square."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", *TILED, *SQUARE)
ALWAYS_SEEING = ("qwen2_5_vl", "qwen3_vl", *TILED)
"""Those that see pictures without `model_args.sees_pictures`."""
POSITIONS = 1024
PATCH, MERGE, TILE = 8, 2, 32
"""Side of a patch in pixels; of a placeholder token in patches; of a tile (SmolVLM) or a square (Gemma 3) in pixels."""
LARGEST_PIXELS = 96 * 96
"""Largest number of pixels of a picture, after which Qwen's processor makes it smaller."""
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
SMOL_MARKS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<image>",
    "<end_of_utterance>",
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(4) for column in range(4)),
)
QWEN_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the template of Qwen writes for a picture."""
GEMMA_TEMPLATE = QWEN_TEMPLATE.replace(SHOWN, GEMMA_MARKS[0])
SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The template of SmolVLM, which reads only lists of parts."""
TOOLS_TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- ' ' + tool.function.name -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
""" + QWEN_TEMPLATE.replace(
    "{{- '<|im_end|>\\n' -}}",
    """\
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": ' + (call.function.name | tojson) -}}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}""",
)
"""A template that also writes the names of tools, and calls as Qwen3-VL does."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}
"""The text model. A head has 16 numbers, of whose 8 frequencies time, height and width have 2, 3 and 3."""
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""What the text model of Qwen3.5 has besides. A quarter of a head's numbers are rotated, which are 4 frequencies."""
WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
}
"""What the text model of Gemma 3 has besides. Its window is longer than a picture, and shorter than a sequence."""
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WIDE: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Half as many heads, of 32 numbers. vLLM has no kernel for smaller ones on the CPU."""
WIDE_DELTA: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""The smallest heads of the delta rule for which vLLM has a kernel on the CPU."""


def build_seeing_tokenizer(family: str, tools: bool = False) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are single bytes, with the marks and the template of a family.

    `tools`: the template is TOOLS_TEMPLATE, with the family's marks of a picture.
    """
    vocabulary = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {PAD: PAD_ID, START: START_ID, END: END_ID}
    special: dict[str, Any] = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": [START]}
    marks, template = (SMOL_MARKS, SMOL_TEMPLATE) if family in TILED else (QWEN_MARKS, QWEN_TEMPLATE)
    if family in SQUARE:
        marks, template = GEMMA_MARKS, GEMMA_TEMPLATE
        special |= dict(zip(("boi_token", "eoi_token", "image_token"), marks, strict=True))
    if tools:
        picture = "<image>" if family in TILED else GEMMA_MARKS[0] if family in SQUARE else SHOWN
        template = TOOLS_TEMPLATE.replace(SHOWN, picture)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], **special)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.chat_template, tokenizer.model_max_length = template, POSITIONS
    return tokenizer


def build_processor(family: str) -> Any:
    """Return the image processor of a family."""
    if family in TILED:
        kind = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
        return kind(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    if family in SQUARE:
        return Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE})
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": LARGEST_PIXELS}
    return Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=MERGE)


def build_config(family: str, tied: bool = False, wide: bool = False) -> Any:
    """Return the configuration of a tiny model of a family.

    Args:
        tied: its head is its embedding.
        wide: its heads are wide enough for vLLM on the CPU, as those of SmolVLM, Idefics3 and Gemma 3 always are.
    """
    tokens = build_seeing_tokenizer(family).get_vocab()
    more: dict[str, Any] = {"tie_word_embeddings": tied}
    if family in (*TILED, *SQUARE):
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"image_size": TILE, "patch_size": PATCH, "initializer_range": 0.1}
        if family in SQUARE:
            numbers = (tokens[mark] for mark in GEMMA_MARKS)
            names = ("boi_token_index", "eoi_token_index", "image_token_index")
            more |= {"mm_tokens_per_image": (TILE // PATCH // MERGE) ** 2, **dict(zip(names, numbers, strict=True))}
            vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
            text = {"model_type": "gemma3_text", **TEXT, **WINDOWED, "tie_word_embeddings": tied}
            return AutoConfig.for_model(family, text_config=text, vision_config=vision, **more)
        text = {"model_type": "llama", **TEXT, **WIDE}
        return AutoConfig.for_model(
            family,
            text_config=text,
            vision_config=vision,
            image_token_id=tokens["<image>"],
            pad_token_id=PAD_ID,
            **more,
        )
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH}
    vision |= {"spatial_merge_size": MERGE, "out_hidden_size": TEXT["hidden_size"], "initializer_range": 0.1}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 36}
    text = {**TEXT, "rope_parameters": ROPE | ({} if family == "qwen2_5_vl" else {"mrope_interleaved": True})}
    if wide and family != "qwen3_5":
        text |= WIDE
        text["rope_parameters"] |= {"mrope_section": [4, 6, 6]}
    if family == "qwen3_vl":
        vision["deepstack_visual_indexes"] = [0, 1]
        text["head_dim"] = TEXT["hidden_size"] // text["num_attention_heads"]
    elif family == "qwen3_5":
        text |= HYBRID | {"tie_word_embeddings": tied} | (WIDE_DELTA if wide else {})
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    ids = {
        f"{name}_token_id": tokens[mark]
        for name, mark in zip(("vision_start", "vision_end", "image", "video"), QWEN_MARKS, strict=True)
    }
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **ids, **more)


def build_seeing_model(family: str, seed: int, tied: bool = False, wide: bool = False) -> PreTrainedModel:
    """Return a model with random fp32 weights. The same seed gives the same weights. See `build_config`."""
    config = build_config(family, tied, wide)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # which would be 0, so that no test would notice a missing one
                torch.nn.init.normal_(parameter, std=0.02)
            elif name.endswith("mm_input_projection_weight"):  # which would be 0 too
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("A_log"):  # with transformers' own, most states would decay within a token
                torch.nn.init.uniform_(parameter, -4.0, 0.0)
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID)
    return model


def write_seeing_model(
    folder: Path, family: str, seed: int, tied: bool = False, tools: bool = False, wide: bool = False
) -> None:
    """Write the model with its tokenizer and its image processor. The folder appears only when it is complete."""
    disable_progress_bar()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build_seeing_model(family, seed, tied, wide).save_pretrained(partial)
    build_seeing_tokenizer(family, tools).save_pretrained(partial)
    build_processor(family).save_pretrained(partial)
    if family in TILED:  # what vLLM reads the number of placeholders of a tile from
        seen = {
            "processor_class": "Idefics3Processor",
            "image_seq_len": (TILE // PATCH) ** 2 // build_config(family).scale_factor ** 2,
        }
        (partial / "processor_config.json").write_text(json.dumps(seen), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", action="store_true", help="with a template that also writes tools and their calls")
    given = parser.parse_args()
    write_seeing_model(given.folder, given.family, given.seed, tools=given.tools)
