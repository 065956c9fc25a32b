"""`python -m roll.evaluate RUN|CHECKPOINT|MODEL [--data FILE ... --reward NAME] [key=value ...]`.

No module imports this one, because in Python the name `roll.evaluate` refers to the function in `roll/api.py`.
"""

from __future__ import annotations

import sys

from roll.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
