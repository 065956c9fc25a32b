"""Chooses the renderer of a model's conversations."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.bridges import TemplateRenderer
from roll.data.renderers.encoding import Encoder
from roll.data.renderers.templates import template_text, turns_renderer
from roll.errors import BadInput, Fault

REMEDY = "choose data_args.template: chatml or qwen2_5 (the tokenizer must have <|im_start|> and <|im_end|>), or a model whose template can"


def chat_renderer(tokenizer: PreTrainedTokenizerBase, model_path: str | Path, template: str) -> ChatRenderer:
    """Return the renderer of a model's conversations over several turns.

    Args:
        model_path: the model's folder.
        template: as `data_args.template`.

    Raises:
        BadInput: a conversation in this format cannot be continued from its tokens.
    """
    from roll.data.renderers.library import family_renderer  # imported here, because the library takes a second to import

    try:
        eos = tokenizer.eos_token_id
        encoder = Encoder(tokenizer, template_text(tokenizer, template))
        render = turns_renderer(tokenizer, template)
        known = family_renderer(tokenizer, encoder, render, model_path) if template == "native" else None
        if known is not None:
            return known
        renderer = TemplateRenderer(encoder, render, eos if isinstance(eos, int) else None)
        renderer.check()
    except ValueError as error:
        problem = f"the model '{model_path}' cannot play several turns with the template '{template}': {error}"
        raise BadInput([Fault("environments", problem, REMEDY)]) from error
    return renderer
