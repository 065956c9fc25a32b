"""Encodes the values of batched calls with pickle, and completions in a more compact form, because there are many of them.

Token ids and log-probs of a completion are sent as bytes, and its versions as one number if all tokens have the same version. Decoded
arrays are read-only, like arrays that Ray returns.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import numpy as np

from roll.types import Completion, FinishReason, Floats, Ints

REASONS = {reason.value: reason for reason in FinishReason}


def encoded(value: Any) -> bytes:
    """Return the bytes from which `decoded` restores a value. If the value cannot be pickled, raise pickle's error, of any type."""
    stream = BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {Completion: _taken_apart}
    pickler.dump(value)
    return stream.getvalue()


def decoded(travelled: bytes) -> Any:
    """Return the value that `encoded` turned into these bytes."""
    return pickle.loads(travelled)


def _taken_apart(one: Completion) -> tuple[Any, ...]:
    token_ids, versions = np.asarray(one.token_ids, np.int32), np.asarray(one.policy_versions, np.int32)
    is_one_version = len(versions) and (versions == versions[0]).all()
    log_probs = None if one.log_probs is None else np.asarray(one.log_probs, np.float32).tobytes()
    travels = int(versions[0]) if is_one_version else versions.tobytes()
    return _put_together, (token_ids.tobytes(), log_probs, travels, one.finish_reason.value, one.text)


def _put_together(token_ids: bytes, log_probs: bytes | None, versions: int | bytes, reason: str, text: str) -> Completion:
    ids: Ints = np.frombuffer(token_ids, np.int32)
    kept: Floats | None = None if log_probs is None else np.frombuffer(log_probs, np.float32)
    if isinstance(versions, bytes):
        of_tokens: Ints = np.frombuffer(versions, np.int32)
    else:
        of_tokens = np.empty(len(ids), np.int32)
        of_tokens.fill(versions)
    return Completion(ids, kept, of_tokens, REASONS[reason], text)
