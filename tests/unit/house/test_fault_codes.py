"""The codes of faults: each is explained once, and each is used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from roll.errors import FaultCode

ROOT = Path(__file__).parents[3]
ERRORS = (ROOT / "roll/errors.py").read_text(encoding="utf-8")
CODES = get_args(FaultCode)


def test_every_code_is_explained_in_order() -> None:
    assert re.findall(r"^\| `(\w+)` +\|", ERRORS, re.MULTILINE) == list(CODES) == sorted(CODES)


def test_every_code_is_used() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "roll").rglob("*.py") if path.name != "errors.py"]
    assert [code for code in CODES if not any(f'"{code}"' in source for source in sources)] == []
