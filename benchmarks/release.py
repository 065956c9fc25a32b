"""Builds a release and tries it: `make release-check`.

    python benchmarks/release.py [--folder dist]

It builds a source distribution, and from that a wheel, into the folder; checks that the wheel has every file of the
package, the examples and the locks, and nothing else; installs it into a new environment; and starts all its commands
there, outside the repository. The packages that roll needs come from the environment that runs this program. Nothing is
published. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Collection, Iterator
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"roll": "roll", "examples": "roll/_examples", "requirements": "roll/_requirements"}
"""Folders of the repository, and their places in the wheel."""
SECONDS = 600.0
"""Longest time of one command."""


def source_files(root: Path) -> set[str]:
    """Return the places in the wheel of all files that a repository gives it."""
    return {
        f"{place}/{file.relative_to(root / folder).as_posix()}"
        for folder, place in PLACES.items()
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def build_sdist(root: Path, folder: Path) -> Path:
    """Build the source distribution of a repository into a folder and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder.resolve())]
    _run(command, root)
    return max(folder.glob("*.tar.gz"), key=lambda file: file.stat().st_mtime)


def build_wheel(sdist: Path, folder: Path) -> Path:
    """Build a wheel from a source distribution alone, as pip does, into a folder and return its file."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(sdist, scratch)
        [source] = Path(scratch).iterdir()
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
        _run([*command, str(folder.resolve())], source)
    return max(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)


def wheel_faults(wheel: Path, expected: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the files and the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.split("/")[0].endswith(".dist-info")]
        [metadata] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        headers = message_from_bytes(packed.read(metadata))
    yield from (f"missing in the wheel: {name}" for name in sorted({*expected} - {*names}))
    yield from (f"only in the wheel: {name}" for name in sorted({*names} - {*expected}))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for header, value in {"Name": project["name"], "Requires-Python": project["requires-python"]}.items():
        if headers[header] != value:
            yield f"METADATA: {header} is {headers[header]}, not {value}"
    if headers["Description-Content-Type"] != "text/markdown":
        yield "METADATA: the description is not Markdown"


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment and return its interpreter. All other packages come from this one.

    Python searches a folder from a .pth file last, and ignores the .pth files in it, such as the one of the checkout.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, str(wheel.resolve())], folder)
    site = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    (Path(site) / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return python


def trials() -> list[list[str]]:
    """Return the commands that an installed release must run: a plan, the versions, and the help of each command."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    plan = ["python", "-m", "roll.pipeline", "--config-name", "rlvr_lora_zero3", "dry_run=true"]
    return [plan, ["roll", "--version"], *([script, "--help"] for script in scripts)]


def run_installed(python: Path, command: list[str], folder: Path, given: str = "", seconds: float = SECONDS) -> str:
    """Run a command as in a shell with the environment of `python` activated, and return what it prints.

    Raises:
        RuntimeError: the command failed; with the end of its output.
        subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    return _run(command, folder, environment, given, seconds)


def _run(
    command: list[str],
    folder: Path,
    environment: dict[str, str] | None = None,
    given: str = "",
    seconds: float = SECONDS,
) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main() -> int:
    """Build, check and try a release."""
    parser = argparse.ArgumentParser(description="Build a release and try it.")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the two files are written")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(ROOT, folder)
    wheel = build_wheel(sdist, folder)
    faults = list(wheel_faults(wheel, source_files(ROOT)))
    with tempfile.TemporaryDirectory() as scratch:
        python, outside = install(wheel, Path(scratch) / "env"), Path(scratch) / "outside"
        outside.mkdir()
        imported = run_installed(python, ["python", "-c", "import roll; print(roll.__file__)"], outside).strip()
        if not Path(imported).is_relative_to(Path(scratch).resolve()):
            faults.append(f"roll is imported from {imported}, not from the wheel")
        for command in trials():
            try:
                run_installed(python, command, outside)
                print(f"ok: {' '.join(command)}")
            except RuntimeError as error:
                faults.append(str(error))
    print("\n".join([*faults, *(f"{file} ({file.stat().st_size / 1e6:.1f} MB)" for file in (sdist, wheel))]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
