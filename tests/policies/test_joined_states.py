"""States of streams that come from different places, as one."""

from __future__ import annotations

import numpy as np
from specstop.policies.state import empty, join


def test_states_are_joined_and_the_narrower_filled_up() -> None:
    one, other = (np.ones((2, 1)), np.array([1, 2])), (np.full((1, 3), 7.0), np.array([3]))
    wide, keys = join([one, other])
    assert wide.tolist() == [[1, 0, 0], [1, 0, 0], [7, 7, 7]] and keys.tolist() == [1, 2, 3]


def test_one_state_is_itself_and_nothing_remembered_stays_nothing() -> None:
    alone = (np.ones((2, 1)),)
    assert join([alone]) is alone and join([None, None]) is None


def test_an_empty_state_has_the_form_of_another() -> None:
    (found,) = empty((np.ones((2, 3), dtype=np.int64),), 1)
    assert found.tolist() == [[0, 0, 0]] and found.dtype == np.int64
