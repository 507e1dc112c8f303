"""Rows are found again by what they hold."""

from __future__ import annotations

import numpy as np
import pytest
from specstop.decode.engines.drafting import EngineDraft, RequestRows


def texts(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def rows_of(count: int, growth: int = 9) -> RequestRows:
    """Return rows in which each text may grow by this number of tokens in a step."""
    rows = RequestRows(count)
    for row in rows.rows:
        row.draft = EngineDraft(0, 0, [0] * (growth - 1))
    return rows


def test_a_request_that_moves_keeps_its_row() -> None:
    rows = rows_of(3)
    first = rows.place(texts([1, 2, 3], [1, 2, 4], [9, 9]))
    assert [one.index for one in first if one] == [0, 1, 2] and not any(one.continued for one in first if one)
    moved = rows.place(texts([9, 9, 5], [1, 2, 3, 7]))
    assert [(one.index, one.continued, one.kept, one.new) for one in moved if one] == [
        (2, True, 2, [5]),
        (0, True, 3, [7]),
    ]
    assert rows.rows[0].text.tolist() == [1, 2, 3, 7] and rows.rows[1].text.tolist() == [1, 2, 4]


def test_a_row_that_was_left_out_is_found_again_and_the_oldest_gives_way() -> None:
    rows = rows_of(2)
    rows.place(texts([1, 1], [2, 2]))
    rows.place(texts([1, 1, 1]))  # the second is preempted
    back = rows.place(texts([2, 2, 3], [1, 1, 1, 1]))
    assert [one.index for one in back if one] == [1, 0] and all(one.continued for one in back if one)
    rows.place(texts([2, 2, 3, 4]))
    new = rows.place(texts([1, 1, 5], [2, 2, 3, 4, 4]))
    assert new[0] is not None and (new[0].index, new[0].continued, new[0].kept, new[0].new) == (0, False, 2, [5])


def test_a_text_that_has_grown_by_more_than_a_step_is_another_one() -> None:
    rows = rows_of(1, 3)
    rows.place(texts([1, 2]))
    (longer,) = rows.place(texts([1, 2, 3, 4, 5, 6]))
    assert longer is not None and (longer.continued, longer.kept, longer.new) == (False, 2, [3, 4, 5, 6])


def test_names_tell_equal_texts_apart_and_a_name_may_come_again_with_another_text() -> None:
    rows = rows_of(3)
    rows.place(texts([1, 2], [1, 2]), ["a", "b"])
    after = rows.place(texts([1, 2, 4], [1, 2, 3]), ["b", "a"])
    assert [one.index for one in after if one] == [1, 0]
    (again,) = rows.place(texts([7]), ["a"])
    assert again is not None and (again.index, again.continued) == (0, False)
    (other,) = rows.place(texts([1, 2, 4, 5]), ["c"])
    assert other is not None and (other.index, other.continued) == (2, False)


def test_more_requests_than_rows_leave_some_without_one() -> None:
    rows = rows_of(2)
    placed = rows.place(texts([1], [2], [3]))
    assert [None if one is None else one.index for one in placed] == [0, 1, None]


@pytest.mark.parametrize("names", [True, False])
def test_long_texts_and_many_steps(names: bool) -> None:
    chance = np.random.default_rng(0)
    rows, held = rows_of(4), [[int(t) for t in chance.integers(0, 50, 300)] for _ in range(4)]
    found: dict[int, int] = {}
    for _ in range(60):
        order = chance.permutation(4)
        for i in order:
            held[i] += [int(t) for t in chance.integers(0, 50, chance.integers(1, 4))]
        placed = rows.place(
            [np.array(held[i], dtype=np.int32) for i in order], [f"r{i}" for i in order] if names else None
        )
        for i, one in zip(order, placed, strict=True):
            assert one is not None and found.setdefault(int(i), one.index) == one.index
            assert rows.rows[one.index].text.tolist() == held[i]


def test_requests_stay_in_the_first_rows_and_the_one_left_out_for_longest_gives_way() -> None:
    """Attention reads the rows up to the last in use; a request that was left out of steps may be back."""
    rows = rows_of(16)
    rows.place(texts([1, 1], [2, 2]))
    for step in range(9):  # the first is away
        rows.place(texts([2] * (3 + step)))
    new, _ = rows.place(texts([4, 4], [2] * 12))
    assert new is not None and new.index == 2, "never used, and among the first four"
    back, _ = rows.place(texts([1, 1, 1], [2] * 13))
    assert back is not None and back.continued and back.index == 0
    used = set()
    for request in range(5, 40):
        found = rows.place(texts([request] * 2, [2] * (request + 9)))
        used |= {one.index for one in found if one is not None}
    assert max(used) < 4
