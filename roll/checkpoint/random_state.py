"""The driver's own random generators: Python's, NumPy's legacy one and torch's on the CPU."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import numpy as np
import torch

from roll.errors import CheckpointError

RANDOM_FILE = "random.json"


def write_random_state(folder: Path) -> None:
    """Write the state of the three generators of this process."""
    numpy_state = np.random.get_state(legacy=False)
    keys = numpy_state["state"]["key"].tolist()
    states = {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": keys}},
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii"),
    }
    (folder / RANDOM_FILE).write_text(json.dumps(states), encoding="utf-8")


def restore_random_state(folder: Path) -> None:
    """Continue the three generators exactly where `write_random_state` saw them.

    Raises:
        CheckpointError: the file is absent or not what `write_random_state` writes.
    """
    path = folder / RANDOM_FILE
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
        version, words, gauss = states["python"]
        torch_state = np.frombuffer(base64.b64decode(states["torch"], validate=True), dtype=np.uint8)
        numpy_state = states["numpy"]
        numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch.from_numpy(torch_state.copy()))
    except (FileNotFoundError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: no random state can be read from it: {error}; take another checkpoint") from error
