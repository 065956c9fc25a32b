"""Lets vLLM resize pictures with Pillow, as the trainer does.

Where torchvision is installed, transformers' image processors resize with it by default. Some of its pixels differ from
Pillow's by a step of 255, so that the log-probs of an engine differed from the trainer's by up to 5e-3 nats on tiny
random models, instead of 1e-6. The loss would take that for a change of the policy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import AutoImageProcessor


def use_pillow() -> None:
    """Let the image processors that vLLM loads in this process resize with Pillow. Idempotent.

    vLLM has no argument for it: what its `mm_processor_kwargs` have would also reach the processor of videos, which
    has no such backend.
    """
    chosen: Any = AutoImageProcessor
    if not isinstance(chosen.from_pretrained, partial):
        chosen.from_pretrained = partial(chosen.from_pretrained, backend="pil")
