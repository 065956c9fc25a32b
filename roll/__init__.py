"""roll: RL post-training of language models with DeepSpeed, vLLM and Ray, composed with Hydra.

The Python interface is in `roll/api.py`, which is imported only when one of its names (`load_config`, `train`,
`evaluate`, ...) is used.
"""

import logging
from typing import TYPE_CHECKING

# PEFT imports bitsandbytes if it is installed. On some CPUs that warns that a kernel of the Hub is missing, which
# nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

if TYPE_CHECKING:
    from roll.api import BadInput, EvaluationResult, Request, RollError, TrainResult, evaluate, load_config, train

__version__ = "0.2.0"
__all__ = [
    "BadInput",
    "EvaluationResult",
    "Request",
    "RollError",
    "TrainResult",
    "evaluate",
    "load_config",
    "train",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("roll.api"), name)
    raise AttributeError(f"module 'roll' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
