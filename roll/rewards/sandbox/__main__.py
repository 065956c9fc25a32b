"""`python -m roll.rewards.sandbox` prints, as JSON, why no sandbox can run on this machine, or null."""

from __future__ import annotations

import json

from roll.rewards.sandbox.bubblewrap import SandboxUnavailable, find_interpreter
from roll.rewards.sandbox.program import ready

if __name__ == "__main__":
    try:
        ready(find_interpreter(None), sandboxed=True)
        print(json.dumps(None))
    except SandboxUnavailable as error:
        print(json.dumps(str(error)))
