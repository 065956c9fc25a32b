"""One member of a broadcast of weights between CPUs: `broadcast.py RANK SIZE ADDRESS PORT OWN_ADDRESS MIB`.

Prints the seconds from the start of the broadcast until all bytes are here. `links.py` starts the members.
"""

from __future__ import annotations

import sys
import time

import torch

from roll.system.addresses import use_node_address
from roll.weight_sync.device import Broadcast
from roll.weight_sync.routes import Rendezvous

JOIN_SECONDS = 300.0
"""Deadline for all members to join, and for the broadcast."""


def main() -> None:
    rank, size, address, port, own, mib = sys.argv[1:]
    use_node_address(own)
    try:
        group = Broadcast(Rendezvous(address, int(port), int(size), JOIN_SECONDS), int(rank), torch.device("cpu"))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    buffer = torch.full((int(mib) << 20,), 7 if rank == "0" else 0, dtype=torch.uint8)
    began = time.perf_counter()
    group.start(buffer).wait()
    seconds = time.perf_counter() - began
    assert buffer.min() == 7, "not all bytes arrived"
    print(f"{seconds:.3f}")


if __name__ == "__main__":
    main()
