"""Chooses the renderer for a model's conversations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.data.chat import NOTHING
from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.bridges import TemplateRenderer
from roll.data.renderers.encoding import Encoder
from roll.data.renderers.templates import template_text, turns_renderer
from roll.errors import BadInput, Fault

REMEDY = (
    "set data_args.template to chatml or qwen2_5 (the tokenizer must have <|im_start|> and <|im_end|>), or use another "
    "model"
)


def chat_renderer(
    tokenizer: PreTrainedTokenizerBase, model_path: str | Path, template: str, further: Mapping[str, Any] = NOTHING
) -> ChatRenderer:
    """Return the renderer for a model's conversations over several turns.

    Args:
        model_path: folder of the model.
        template: value of `data_args.template`.
        further: value of `data_args.chat_template_kwargs`.

    Raises:
        BadInput: a conversation in this format cannot be continued from its tokens.
    """
    from roll.data.renderers.library import (
        family_renderer,
    )  # imported here, because the library takes a second to import

    try:
        eos = tokenizer.eos_token_id
        encoder = Encoder(tokenizer, template_text(tokenizer, template))
        render = turns_renderer(tokenizer, template, further)
        known = family_renderer(tokenizer, encoder, render, model_path) if template == "native" else None
        if known is not None:
            return known
        renderer = TemplateRenderer(encoder, render, eos if isinstance(eos, int) else None)
        renderer.check()
    except ValueError as error:
        problem = (
            f"the model '{model_path}' cannot play episodes of several turns with the template '{template}': {error}"
        )
        raise BadInput([Fault("environments", problem, REMEDY)]) from error
    return renderer
