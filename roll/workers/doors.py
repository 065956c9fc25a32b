"""Restricts access to the Ray that a run starts for itself to processes of this host that have its token.

Any process that reaches Ray's ports can run code as the user. Ray 2.60 listens on every interface. If it asks for a token, it
uses the one below the home folder, which every local user may read and all runs share.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

LOOPBACK = "127.0.0.1"
OF_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Ray's variables for a token, and for whether to require one."""


@contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Let a Ray that starts in the block require a token, which lies in `folder`. No other user may enter the folder.

    The processes that Ray starts find it by the variables that they inherit; the token itself is in none of them.
    """
    file = folder / "ray_token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    before = {name: os.environ.pop(name, None) for name in OF_TOKENS}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
        _read_again()


def _read_again() -> None:
    """Let Ray read the variables again, which it reads once at import. The mode first: a late thread of Ray must not ask for a token."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def loopback() -> Iterator[str]:
    """Let Ray start in the block at the yielded address. Its servers then only listen there.

    Elsewhere Ray puts the address of an interface in place of a loopback one, lest it is given to another host.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
