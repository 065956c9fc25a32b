"""`python -m roll.rewards.sandbox` prints why no sandbox runs here, as JSON; null if one does."""

from __future__ import annotations

import json

from roll.rewards.sandbox.bubblewrap import SandboxUnavailable, survey
from roll.rewards.sandbox.program import ready

if __name__ == "__main__":
    try:
        ready(survey(None), sandboxed=True)
        print(json.dumps(None))
    except SandboxUnavailable as error:
        print(json.dumps(str(error)))
