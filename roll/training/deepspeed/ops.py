"""Prints as JSON which DeepSpeed ops are installed and which can be compiled here, for the doctor."""

from __future__ import annotations

import json
from typing import Any

from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import probe_is_compatible

PLACEHOLDER = "deepspeed_not_implemented"


def ops() -> dict[str, dict[str, bool]]:
    """Return, for each op by name, whether it is `installed` and `compatible`, so that it can be compiled."""
    builders: dict[str, Any] = {name: builder for name, builder in ALL_OPS.items() if name != PLACEHOLDER}
    return {
        name: {
            "installed": bool(installed_ops.get(name)),
            "compatible": bool(probe_is_compatible(builder, verbose=False)),
        }
        for name, builder in builders.items()
    }


if __name__ == "__main__":
    print(json.dumps(ops()))
