"""One member of a broadcast of weights between CPUs: `broadcast.py RANK SIZE ADDRESS PORT OWN_ADDRESS MIB [SECONDS]`.

SECONDS is the deadline for all members to join, and for the broadcast. Prints the seconds from the start of the
broadcast until all bytes are here. `links.py` starts the members.
"""

from __future__ import annotations

import sys
import time

import torch

from roll.system.addresses import use_node_address
from roll.weight_sync.device import Broadcast
from roll.weight_sync.routes import Rendezvous


def main() -> None:
    rank, size, address, port, own, mib, *limit = sys.argv[1:]
    deadline = float(limit[0]) if limit else 300.0
    use_node_address(own)
    try:
        group = Broadcast(Rendezvous(address, int(port), int(size), deadline), int(rank), torch.device("cpu"))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    buffer = torch.full((int(mib) << 20,), 7 if rank == "0" else 0, dtype=torch.uint8)
    print("joined", flush=True)
    began = time.perf_counter()
    try:
        group.start(buffer).wait()
    except RuntimeError as error:
        sys.exit(f"failed after {time.perf_counter() - began:.1f} s: {error}")
    seconds = time.perf_counter() - began
    assert buffer.min() == 7, "not all bytes arrived"
    print(f"{seconds:.3f}", flush=True)
    group.close()  # gloo's threads may abort the interpreter's end


if __name__ == "__main__":
    main()
