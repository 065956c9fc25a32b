"""Restricts access to a Ray cluster that a run starts itself: only processes of this host with the cluster's token can use it.

Any process that reaches Ray's ports can run code as the user. Ray 2.60 listens on every interface. If tokens are required, its default
token is in a file below the home folder. All runs share this file, and every local user may read it.
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
"""Ray's environment variables for requiring a token and for the token itself."""


@contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """A context in which a Ray cluster that starts requires a token. The token is in a file in `folder`, which must be private.

    The processes that Ray starts inherit variables with the path of the file, but not the token itself.
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
    """Make Ray reread the variables, which it reads once at import.

    The mode is read before the token, so that a thread of Ray that is still running does not look for a token that is gone.
    """
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def loopback() -> Iterator[str]:
    """A context in which Ray can start at the yielded loopback address. Its servers then listen only there.

    Otherwise Ray would replace a loopback address by that of a network interface, because other hosts could not use it.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield LOOPBACK
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
