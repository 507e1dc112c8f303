"""The features of a few tokens as plain numbers are those of `Rows`."""

from __future__ import annotations

import pytest
import torch
from specstop.policies.errors import PolicyError
from specstop.policies.features import Rows, compute
from specstop.policies.few import FewReader, FewRows, reads_few
from torch import Tensor

NAMES = (
    "top1", "top2", "margin", "top1_logit", "entropy", "drawn_prob", "path_logprob", "noisy_margin", "noisy_score",
    "noisy_lead", "depth", "branch_rank", "temperature", "drawn_token", "above_token",
)  # fmt: skip
WIDTHS = (3, 1, 2)


def levels(temperature: float, seed: int, masked: bool) -> list[tuple[FewRows, Rows]]:
    """Return two depths of a tree: one root row with two tokens, and three rows with the tokens of `WIDTHS` below them."""
    generator = torch.Generator().manual_seed(seed)
    out: list[tuple[FewRows, Rows]] = []
    few: FewRows | None = None
    path = torch.zeros(3)
    for depth, widths in ((1, (3,)), (2, WIDTHS)):
        logits = 2.0 * torch.randn(len(widths), 12, generator=generator)
        sampled: Tensor | None = None
        if masked:
            sampled = (logits / (temperature or 1.0)).masked_fill(logits < logits.topk(6).values[:, -1:], -torch.inf)
        noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator)))
        base = logits if sampled is None else sampled
        scores = base + noise if temperature else base
        owner = [row for row, width in enumerate(widths) for _ in range(width)]
        rank = [at for width in widths for at in range(width)]
        order = scores.argsort(-1, descending=True)
        tokens = [int(order[o, r]) for o, r in zip(owner, rank, strict=True)]
        width = [widths[o] for o in owner]
        behind = [4] * len(owner) if few is None else [few.tokens[o] for o in owner]
        few = FewRows(logits, temperature, scores, owner, tokens, rank, width, behind, few, owner, depth, sampled)
        parent = path[owner]
        many = Rows(
            logits[owner], temperature, scores[owner], torch.tensor(tokens), parent, depth,
            None if sampled is None else sampled[owner], torch.tensor(rank), torch.tensor(width), torch.tensor(behind),
        )  # fmt: skip
        path = many.path_logprob
        out.append((few, many))
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_those_of_rows(temperature: float, masked: bool) -> None:
    for seed in range(5):
        for few, many in levels(temperature, seed, masked and temperature > 0.0):
            found = torch.tensor(FewReader(NAMES)(few)).T
            torch.testing.assert_close(found, compute(NAMES, many), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_each_alone_is_as_among_all(name: str) -> None:
    few, _ = levels(0.7, 1, False)[1]
    everything = torch.tensor(FewReader(NAMES)(few)[NAMES.index(name)])
    few.paths = None
    torch.testing.assert_close(torch.tensor(FewReader([name])(few)[0]), everything)


def test_others_are_left_to_rows() -> None:
    assert reads_few(NAMES) and not reads_few(("top3",)) and not reads_few(("anchor_top1",))


def test_noisy_features_need_match() -> None:
    few, _ = levels(0.7, 1, False)[0]
    few.scores = None
    with pytest.raises(PolicyError, match="match verification"):
        FewReader(("noisy_margin",))(few)
