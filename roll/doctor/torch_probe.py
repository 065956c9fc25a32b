"""Prints torch's view of this machine as one line of JSON. It runs in a separate process, because a broken installation
may crash it.
"""

from __future__ import annotations

import json

import torch
from torch.cuda import nccl


def main() -> None:
    cuda = torch.cuda.is_available()
    facts = {
        "cuda": torch.version.cuda,
        "cuda_available": cuda,
        "devices": torch.cuda.device_count() if cuda else 0,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
