"""The token head: tables looked up as a sum would have it, at each depth what is known there, one row as many."""

from __future__ import annotations

import pytest
import torch
from specstop.policies.errors import PolicyError
from specstop.policies.heads import TokenHead, build_head

NAMES = ("anchor_token", "entropy", "drawn_token", "above_token")
WIDTH, SIZE = 9, 7
STRIDES = [[0, 0, 1, 5, 0], [3, 0, 1, 0, 2], [0, 4, 1, 0, 0]]
"""Of what is above and drawn; of the anchor, what is drawn and the depth; of what is drawn and the range of the entropy."""


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "mean": torch.tensor([0.5]),
        "scale": torch.tensor([2.0]),
        "weight": torch.randn(3, 1, generator=generator),
        "bias": torch.randn(2, 4, generator=generator),
        "table": torch.randn(2, 3, WIDTH, generator=generator),
        "strides": torch.tensor(STRIDES),
        "edges": torch.tensor([[0.25, 0.5]]),
        "crosses": torch.randn(2, len(STRIDES), SIZE, generator=generator),
    }


def rows(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WIDTH + 3, (count, 3), generator=generator).float()  # some beyond the table
    return torch.stack([ids[:, 0], torch.rand(count, generator=generator), ids[:, 1], ids[:, 2]], 1)


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_scores_are_the_sums_that_they_are_said_to_be(depth: int) -> None:
    t, x = tensors(), rows(30)
    found = TokenHead(NAMES, t).logits(x, depth)
    for row, scores in zip(x.tolist(), found.tolist(), strict=True):
        for output, weight in ((0, 0), (1, 1 if depth else 2)):
            # At depth 0 a PRE scalar is not known: it counts as its mean.
            value = 0.0 if depth == 0 else (row[1] - 0.5) / 2.0
            wanted = float(t["bias"][output, min(depth, 3)]) + value * float(t["weight"][weight, 0])
            for feature, place in ((0, 0), (1, 2), (2, 3)):
                if (feature == 0) == (depth == 0) and row[place] < WIDTH:
                    wanted += float(t["table"][output, feature, int(row[place])])
            if depth:
                anchor, entropy, drawn, above = row
                within = (entropy > 0.25) + (entropy > 0.5)
                sums = (drawn + 5 * above, 3 * anchor + drawn + 2 * depth, 4 * within + drawn)
                wanted += sum(float(t["crosses"][output, at, int(total) % SIZE]) for at, total in enumerate(sums))
            assert scores[output] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("depth", [0, 2])
def test_one_row_is_scored_as_many(depth: int) -> None:
    head = TokenHead(NAMES, tensors())
    x = rows(40)
    for one, many in zip(x.tolist(), head.logits(x, depth).tolist(), strict=True):
        assert head.logits_one(one, depth) == pytest.approx(many, abs=1e-5)


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
@pytest.mark.parametrize("bare", [False, True], ids=["crosses", "no crosses"])
def test_branches_of_a_depth_are_scored_as_rows(depth: int, bare: bool) -> None:
    names, x = (*NAMES, "mean_accepted"), torch.cat([rows(6), torch.full((6, 1), 1.5)], 1)
    x[:, 0] = x[0, 0]  # they share what was known before
    made = {**tensors(), "mean": torch.tensor([0.5, 1.0]), "scale": torch.tensor([2.0, 3.0])}
    made |= {
        "weight": torch.arange(6.0).view(3, 2),
        "strides": torch.tensor([[*row[:-1], 0, row[-1]] for row in STRIDES]),
    }
    head = TokenHead(names, {k: v for k, v in made.items() if not (bare and k in ("strides", "edges", "crosses"))})
    asked = [0] if depth == 0 else [1, 2, 5]
    found = head.logits_few(x.T.tolist(), asked, depth)
    torch.testing.assert_close(torch.tensor(found), head.logits(x[asked], depth))
    assert head.logits_few(x.T.tolist(), [], depth) == []


def test_a_head_without_tokens_or_of_wrong_shape_is_refused() -> None:
    with pytest.raises(PolicyError, match="tokens head: expected one of the features before_token"):
        build_head("tokens", ("entropy",), tensors())
    shapes = {"table": (2, 2, WIDTH), "bias": (3, 4), "weight": (2, 1), "crosses": (2, 2, SIZE)}
    for name, shape in shapes.items():
        with pytest.raises(PolicyError, match=f"expected {name} of shape"):
            build_head("tokens", NAMES, {**tensors(), name: torch.zeros(shape)})
    with pytest.raises(PolicyError, match="expected strides of shape"):
        build_head("tokens", NAMES, {**tensors(), "strides": torch.zeros(3, 4, dtype=torch.int64)})
    with pytest.raises(PolicyError, match="expected edges for 1 crossed scalars"):
        build_head("tokens", NAMES, {**tensors(), "edges": torch.zeros(2, 2)})
    for name, wrong in (("edges", torch.tensor([[0.5, 0.25]])), ("strides", -torch.tensor(STRIDES))):
        with pytest.raises(PolicyError, match="expected ascending edges, and strides between 0 and"):
            build_head("tokens", NAMES, {**tensors(), name: wrong})


def test_a_head_made_without_crosses_is_one_whose_crosses_say_nothing() -> None:
    t, x = tensors(), rows(20)
    silent = TokenHead(NAMES, {**t, "crosses": torch.zeros(2, len(STRIDES), SIZE)})
    for name in ("strides", "edges", "crosses"):
        del t[name]
    assert torch.equal(TokenHead(NAMES, t).logits(x, 2), silent.logits(x, 2))


def test_an_edge_belongs_to_the_range_below_it_for_one_row_as_for_many() -> None:
    t = tensors()
    edge = t["edges"][0, 1]
    head = TokenHead(NAMES, t)
    for entropy in (edge, edge.nextafter(torch.tensor(2.0)), edge.nextafter(torch.tensor(0.0))):
        row = torch.stack([torch.tensor(1.0), entropy, torch.tensor(2.0), torch.tensor(3.0)])
        assert head.logits_one(row.tolist(), 1) == pytest.approx(head.logits(row[None], 1)[0].tolist(), abs=1e-5)
