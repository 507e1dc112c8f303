"""The token head: tables looked up as a sum would have it, at each depth what is known there."""

from __future__ import annotations

import numpy as np
import pytest
from feature_head import with_ranges
from specstop.policies.errors import PolicyError
from specstop.policies.heads import build_head
from specstop.policies.heads.tables import HashedFeatures, TokenHead
from token_tensors import NAMES, SIZE, STRIDES, WIDTH, rows, tensors


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_scores_are_the_sums_that_they_are_said_to_be(depth: int) -> None:
    t, x = tensors(), rows(60)
    found = TokenHead(NAMES, t).scores(x, depth)
    for row, scores in zip(x.tolist(), found.tolist(), strict=True):
        for output, weight in ((0, 0), (1, 1 if depth else 2)):
            # At depth 0 a PRE scalar is not known: it counts as its mean.
            value = 0.0 if depth == 0 else (row[1] - 0.5) / 2.0
            wanted = float(t["bias"][output, min(depth, 3)]) + value * float(t["weight"][weight, 0])
            for feature, place in ((0, 0), (1, 2), (2, 3)):
                if (feature == 0) == (depth == 0) and 0 <= row[place] < WIDTH:
                    wanted += float(t["table"][output, feature, int(row[place])])
            if depth:
                anchor, entropy, drawn, parent = row
                within = (entropy > 0.25) + (entropy > 0.5)
                sums = (drawn + 5 * parent, 3 * anchor + drawn + 2 * depth, 4 * within + drawn)
                wanted += sum(float(t["hashed"][output, at, int(total) % SIZE]) for at, total in enumerate(sums))
            assert scores[output] == pytest.approx(wanted, abs=1e-5)


def test_places_are_those_that_the_head_looks_up() -> None:
    """What is fitted by place is scored by place: a table that names each place gives the places back."""
    t, x = tensors(), rows(200)
    hashed = HashedFeatures(NAMES, t["strides"], t["edges"], SIZE)
    names = np.arange(3 * SIZE, dtype=np.float32).reshape(3, SIZE)
    silent = {name: np.zeros_like(t[name]) for name in ("weight", "bias", "table")}
    for depth in (1, 5):
        places = hashed.places(x, np.full(len(x), depth))
        assert ((places >= SIZE * np.arange(3)) & (places < SIZE * np.arange(1, 4))).all()
        for cross in range(3):
            only = np.zeros((2, 3, SIZE), dtype=np.float32)
            only[:, cross] = names[cross]
            found = TokenHead(NAMES, {**t, **silent, "hashed": only}).scores(x, depth)
            assert np.array_equal(found, np.stack([places[:, cross]] * 2, 1))


def test_each_row_of_the_places_has_a_depth_of_its_own() -> None:
    t, x = tensors(), rows(30)
    hashed, depth = HashedFeatures(NAMES, t["strides"], t["edges"], SIZE), np.arange(30) % 4
    alone = [hashed.places(x[i : i + 1], depth[i : i + 1])[0] for i in range(30)]
    assert np.array_equal(hashed.places(x, depth), alone)


def test_tokens_have_no_range() -> None:
    """The next token of the vocabulary is another word, not nearly the same one."""
    t, x = tensors(), rows(50)
    low, high = np.full(4, 3.0), np.full(4, 4.0)
    low[1], high[1] = 0.3, 0.4
    head = TokenHead(NAMES, with_ranges(t, low, high))
    within = x.copy()
    within[:, 1] = x[:, 1].clip(np.float32(0.3), np.float32(0.4))
    for depth in (0, 2):
        assert np.array_equal(head.scores(x, depth), TokenHead(NAMES, t).scores(within, depth))


def test_a_head_without_tokens_or_of_wrong_shape_is_refused() -> None:
    with pytest.raises(PolicyError, match="tokens head: expected one of the features before_token"):
        build_head("tokens", ("entropy",), {**tensors(), "strides": np.zeros((0, 2), dtype=np.int64)})
    shapes = {"table": (2, 2, WIDTH), "bias": (3, 4), "weight": (2, 1), "hashed": (2, 2, SIZE)}
    for name, shape in shapes.items():
        with pytest.raises(PolicyError, match=name):
            build_head("tokens", NAMES, {**tensors(), name: np.zeros(shape, dtype=np.float32)})
    with pytest.raises(PolicyError, match="strides"):
        build_head("tokens", NAMES, {**tensors(), "strides": np.zeros((3, 4), dtype=np.int64)})
    with pytest.raises(PolicyError, match="expected edges for 1 crossed scalars"):
        build_head("tokens", NAMES, {**tensors(), "edges": np.zeros((2, 2), dtype=np.float32)})
    for name, wrong in (("edges", np.array([[0.5, 0.25]], dtype=np.float32)), ("strides", -np.array(STRIDES))):
        with pytest.raises(PolicyError, match="expected ascending edges, and strides between 0 and"):
            build_head("tokens", NAMES, {**tensors(), name: wrong})


def test_a_head_made_without_hashed_features_is_one_whose_tables_are_zero() -> None:
    t, x = tensors(), rows(20)
    silent = TokenHead(NAMES, {**t, "hashed": np.zeros((2, len(STRIDES), SIZE), dtype=np.float32)})
    for name in ("strides", "edges", "hashed"):
        del t[name]
    assert np.array_equal(TokenHead(NAMES, t).scores(x, 2), silent.scores(x, 2))


def test_an_edge_belongs_to_the_range_below_it() -> None:
    t = tensors()
    edge = t["edges"][0, 1]
    hashed = HashedFeatures(NAMES, t["strides"], t["edges"], SIZE)
    around = [edge, np.nextafter(edge, np.float32(2.0)), np.nextafter(edge, np.float32(0.0))]
    x = np.array([[1.0, entropy, 2.0, 3.0] for entropy in around], dtype=np.float32)
    assert hashed.places(x, np.ones(3, dtype=np.int64))[:, 2].tolist() == [
        2 * SIZE + (4 * n + 2) % SIZE for n in (1, 2, 1)
    ]
