"""roll: RL post-training of language models with DeepSpeed, vLLM and Ray, composed with Hydra.

The Python interface is in `roll/api.py`, which is imported only when one of its names (`load_config`, `train`,
`evaluate`, ...) is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.api import EvaluationResult as EvaluationResult
    from roll.api import Request as Request
    from roll.api import TrainResult as TrainResult
    from roll.api import evaluate as evaluate
    from roll.api import load_config as load_config
    from roll.api import train as train

__version__ = "0.2.0"
PUBLIC = ("EvaluationResult", "Request", "TrainResult", "evaluate", "load_config", "train")


def __getattr__(name: str) -> object:
    if name in PUBLIC:
        return getattr(import_module("roll.api"), name)
    raise AttributeError(f"module 'roll' has no attribute '{name}'")
