"""Addresses of stores, `s3://bucket/prefix`: which texts are one, which are malformed, and which package each needs."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard
from urllib.parse import urlsplit

from roll.errors import Fault

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": None}
"""The package that fsspec needs for each scheme. fsspec itself serves `file`."""
EXTRAS = {"s3fs": "s3", "gcsfs": "gs"}
"""The extra of roll that installs the package."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
FETCH = "fetch it first: python -m roll.runs.fetch {address} FOLDER"
"""What to do with a run in a store before a command that reads run folders."""
EXAMPLE = "s3://bucket/prefix, gs://bucket/prefix or file:///folder"


def is_address(text: object) -> TypeGuard[str]:
    """Return whether a value has the form of an address: it begins with a scheme and `://`."""
    return isinstance(text, str) and ADDRESS.match(text) is not None


def normal(address: str) -> str:
    """Return the address without slashes at its end."""
    return address.rstrip("/")


def address_fault(place: str, address: str) -> Fault | None:
    """Return the fault of an address that names no place in a store, or None. It never repeats credentials."""
    parts = urlsplit(address)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in PACKAGES:
        return Fault(place, f"'{shown}': no store has the scheme {parts.scheme}", f"use {EXAMPLE}", "not_supported")
    if "@" in parts.netloc:
        problem = f"'{shown}' was written with credentials, which would end up in files and logs"
        remedy = (
            "remove them; they come from the environment (AWS_ACCESS_KEY_ID) or from the files of the store's tools"
        )
        return Fault(place, problem, remedy, "not_allowed")
    if parts.query or parts.fragment:
        return Fault(place, f"'{shown}' was written with ? or #", "remove what follows them", "malformed")
    if parts.scheme == "file":
        is_whole = not parts.netloc and parts.path.startswith("/") and parts.path.strip("/") != ""
    else:
        is_whole = parts.netloc != "" and parts.path.strip("/") != ""
    if not is_whole or {"..", "."} & set(parts.path.split("/")) or "//" in parts.path:
        return Fault(place, f"'{shown}' names no bucket with a prefix, or no folder", f"use {EXAMPLE}", "malformed")
    return None


def missing_package(place: str, address: str) -> Fault | None:
    """Return the fault of an address whose package is not installed, or None."""
    scheme = urlsplit(address).scheme
    package = PACKAGES.get(scheme)
    if package is None or find_spec(package) is not None:
        return None
    problem = f"'{address}', but the package {package} is not installed"
    remedy = f"install it: pip install 'roll[{EXTRAS[package]}]', or pip install {package}"
    return Fault(place, problem, remedy, "not_installed")


def run_folder(text: str) -> Path:
    """Parse the run folder of a command line. Raises ArgumentTypeError for the address of a run in a store."""
    if is_address(text):
        raise ArgumentTypeError(f"'{text}' is in a store; {FETCH.format(address=text)}")
    return Path(text)


def local_folder(address: str) -> Path:
    """Return the run folder of an `output_dir` in a store: `./output/BUCKET/PREFIX`."""
    parts = urlsplit(normal(address))
    return Path("output") / parts.netloc / parts.path.strip("/")
