"""Uploads the export of a run to a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roll.errors import ConfigError, Fault, RollError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PLACE = "push_to_hub"
LOGIN = "set HF_TOKEN to a token with write access, or run: hf auth login"


def check_upload(repository: str | None) -> None:
    """Check that this machine's token may write to `repository` (`owner/name`), as far as the Hub tells. None passes.

    Raises:
        ConfigError: there is no token, the Hub refuses it or cannot be reached, the token can only read, or its user
            neither is the owner nor belongs to it.
    """
    if repository is None:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(Fault(PLACE, f"'{repository}', but there is no token for the Hub", LOGIN, "missing"))
    try:
        user = _api().whoami()
    except Exception as error:  # the client raises a dozen types of errors: network, token, offline mode
        problem = f"'{repository}', but the Hub does not accept the token: {_one_line(error)}"
        raise ConfigError(Fault(PLACE, problem, f"{LOGIN}; or remove the key", "failed")) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(Fault(PLACE, f"'{repository}', but the token can only read", LOGIN, "not_allowed"))
    owners = [user.get("name"), *(one.get("name") for one in user.get("orgs", ()))]
    if (owner := repository.partition("/")[0]) not in owners:
        problem = f"'{repository}', but the token's user '{owners[0]}' neither is '{owner}' nor belongs to it"
        remedy = f"use one of: {', '.join(f'{name}/NAME' for name in owners)}"
        raise ConfigError(Fault(PLACE, problem, remedy, "not_allowed"))


def upload(export: Path, repository: str, private: bool, left_out: str) -> str:
    """Upload all files of a folder but `left_out` as one commit. Return the address of the repository.

    A repository that does not exist is created; one that exists keeps its visibility.

    Raises:
        RollError: the upload failed. The folder is unchanged.
    """
    by_hand = f"the export is in {export}; upload it with: hf upload {repository} {export}"
    try:
        api = _api()
        address = api.create_repo(repository, private=private, exist_ok=True)
        message = f"Upload {export.parent.name}"
        api.upload_folder(
            repo_id=repository, folder_path=export, commit_message=message, ignore_patterns=[left_out, f"**/{left_out}"]
        )
    except KeyboardInterrupt:
        print(f"the upload to {repository} was interrupted; {by_hand}", flush=True)
        raise
    except Exception as error:  # as above
        raise RollError(f"the upload to {repository} failed: {_one_line(error)}; {by_hand}") from error
    return str(address)


def _api() -> HfApi:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
