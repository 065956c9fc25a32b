"""The Dockerfile copies what exists, installs the lock of `make install`, and can build the package from it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from benchmarks.release import ROOT, build_sdist, build_wheel, source_files, wheel_faults
from tests.unit.house.pins import locked

LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [(word, rest) for word, _, rest in (line.partition(" ") for line in LINES) if word.isupper()]
COPIED = [name.rstrip("/") for word, rest in STEPS if word == "COPY" for name in rest.split()[:-1]]


def test_copied_files_exist_and_are_sent() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    assert sorted(COPIED) == sorted(sent) and all((ROOT / name).exists() for name in COPIED)


def test_the_image_has_the_gpu_lock() -> None:
    runs = [rest for word, rest in STEPS if word == "RUN"]
    assert (
        "requirements/install.sh gpu" in runs and "@requirements/install.sh $(KIND)" in (ROOT / "Makefile").read_text()
    )
    [base] = [rest for word, rest in STEPS if word == "FROM"]
    [cuda] = re.findall(r"cuda:(\d+\.\d+)\.\d+-devel", base)
    assert locked("gpu")["cuda-toolkit"].startswith(f"{cuda}.")


def test_the_copied_files_build_the_package(tmp_path: Path) -> None:
    image = tmp_path / "image"
    for name in COPIED:
        target = image / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, target)
    assert list(wheel_faults(build_wheel(build_sdist(image, tmp_path), tmp_path), source_files(ROOT))) == []


def test_the_doctor_is_the_health_check() -> None:
    [health] = [rest for word, rest in STEPS if word == "HEALTHCHECK"]
    assert json.loads(health.partition("CMD ")[2]) == ["python", "-m", "roll.doctor"]
    assert ("ENV", "PATH=/opt/roll/.venv/bin:$PATH") in STEPS and ("WORKDIR", "/opt/roll") in STEPS
