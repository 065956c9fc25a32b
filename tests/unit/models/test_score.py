"""Where a score is read."""

from __future__ import annotations

import numpy as np
import pytest

from roll.models.score import scored_token


@pytest.mark.parametrize(
    ("token_ids", "pad", "where"),
    [([5, 6, 7], 9, 2), ([5, 6, 9], 9, 1), ([5, 9, 6, 9, 9], 9, 2), ([5, 6, 9], None, 2), ([9, 9, 9], 9, 2), ([5, 9], 9, 1)],
)
def test_the_score_is_read_at_the_last_token_that_is_no_padding(token_ids: list[int], pad: int | None, where: int) -> None:
    mask = scored_token(np.array(token_ids, np.int32), pad)
    assert np.flatnonzero(mask).tolist() == [where]
