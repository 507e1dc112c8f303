"""The features once more, slowly and plainly: what the compiled summaries and columns are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from specstop.decode.summaries import summarise, summarise_on_device
from specstop.policies.errors import PolicyError
from specstop.policies.features import BOUND, NO_SCORES, TOP, Columns, DrawnTokens
from torch import Tensor


class Rows:
    """Rows of logits and what was drawn from them; every derived quantity is computed once, when first read.

    Args:
        logits: [R, V] raw logits, float32 or float64.
        temperature: of the sampling; 0 = greedy.
        scores: [R, V] log q / T + g (logits at temperature 0), what `match` takes the argmax of; None elsewhere.
        tokens: [R] the drawn tokens, for POST features.
        parent_logprob: [R] log-probability of the path before, for POST features.
        depth: j.
        sampled: [R, V] log-weights of the distribution that is sampled from, where it is not softmax(logits / T).
        rank: [R] of the tokens among their siblings; None = each is an only child.
        width: [R] number of siblings, itself included.
        parents: [R] the tokens that they come after.
    """

    def __init__(
        self,
        logits: Tensor,
        temperature: float = 0.0,
        scores: Tensor | None = None,
        tokens: Tensor | None = None,
        parent_logprob: Tensor | None = None,
        depth: int = 0,
        sampled: Tensor | None = None,
        rank: Tensor | None = None,
        width: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> None:
        self.logits = logits
        self.temperature = temperature
        self.scores = scores
        self.tokens = tokens
        self.parent_logprob = parent_logprob
        self.depth = depth
        self.sampled = sampled
        self.rank = rank
        self.width = width
        self.parents = parents

    @cached_property
    def above_token(self) -> Tensor:
        """[R] the ids of the tokens before; -1 where that is not known."""
        return self.constant(-1.0) if self.parents is None else self.parents.to(self.logits.dtype)

    @cached_property
    def probs(self) -> Tensor:
        """[R, V] softmax of the raw logits."""
        return torch.softmax(self.logits, -1)

    @cached_property
    def best(self) -> Tensor:
        """[R, 2] the two largest probabilities."""
        return self.probs.topk(2, -1).values

    @cached_property
    def top(self) -> Tensor:
        """[R, 10] the largest probabilities, descending; zeros beyond the vocabulary."""
        width = min(TOP, self.logits.shape[-1])
        best = self.probs.topk(width, -1).values
        return torch.nn.functional.pad(best, (0, TOP - width)) if width < TOP else best

    @cached_property
    def top1(self) -> Tensor:
        """[R] the largest probability."""
        return self.probs.amax(-1)

    @cached_property
    def top1_logit(self) -> Tensor:
        """[R] the largest raw logit."""
        return self.logits.amax(-1)

    @cached_property
    def log_norm(self) -> Tensor:
        """[R] log of the sum of exponentials of the raw logits."""
        return self.top1_logit - self.top1.log()

    @cached_property
    def entropy(self) -> Tensor:
        """[R] entropy in nats."""
        entropy: Tensor = torch.special.entr(self.probs).sum(-1)
        return entropy

    @cached_property
    def best_scores(self) -> Tensor:
        """[R, 3] noisy scores: the drawn token's, the largest of another token, and the largest of one that was not drawn."""
        if self.scores is None:
            raise PolicyError(NO_SCORES)
        if self.width is None:
            best, second = self.scores.topk(2, -1).values.unbind(-1)
            return torch.stack([best, second, second], -1)
        most = min(int(self.width.max()) + 1, self.scores.shape[-1])
        best = self.scores.topk(most, -1).values
        left_out = best.gather(-1, self.width[:, None].clamp_max(most - 1))[:, 0]
        other = torch.where(self.sibling_rank > 0, best[:, 0], best[:, 1])
        return torch.stack([self.of_drawn(self.scores), other, left_out], -1)

    @cached_property
    def sibling_rank(self) -> Tensor:
        """[R] rank among the siblings."""
        return self.constant(0.0) if self.rank is None else self.rank.to(self.logits.dtype)

    @cached_property
    def drawn_logprob(self) -> Tensor:
        """[R] log-probability of the drawn token at temperature 1."""
        return self.of_drawn(self.logits) - self.log_norm

    def of_drawn(self, values: Tensor) -> Tensor:
        """Return [R], the entries of `values` [R, V] at the drawn tokens."""
        assert self.tokens is not None
        return values.gather(-1, self.tokens[:, None])[:, 0]

    @cached_property
    def path_logprob(self) -> Tensor:
        """[R] log-probability of the path at temperature 1, the drawn token included."""
        assert self.parent_logprob is not None
        return self.parent_logprob + self.drawn_logprob

    def constant(self, value: float) -> Tensor:
        """Return [R], the value in every row."""
        return torch.full_like(self.logits[:, 0], value)

    @cached_property
    def drawn_prob(self) -> Tensor:
        """[R] probability of the drawn token in the distribution that is sampled from."""
        if self.sampled is not None:
            return self.of_drawn(torch.softmax(self.sampled, -1))
        if self.temperature in (0.0, 1.0):
            return self.drawn_logprob.exp()
        return self.of_drawn(torch.log_softmax(self.logits / self.temperature, -1)).exp()


def _ids(rows: Rows) -> Tensor:
    assert rows.tokens is not None
    return rows.tokens.to(rows.logits.dtype)


FORMULAS: dict[str, Callable[[Rows], Tensor]] = {
    "anchor_entropy": lambda rows: rows.entropy,
    "anchor_top1": lambda rows: rows.top1,
    "anchor_margin": lambda rows: rows.best[:, 0] - rows.best[:, 1],
    "anchor_prob": lambda rows: rows.drawn_logprob.exp(),
    "anchor_token": _ids,
    "before_token": lambda rows: rows.above_token,
    "temperature": lambda rows: rows.constant(rows.temperature),
    **{f"top{rank}": lambda rows, rank=rank: rows.top[:, rank - 1] for rank in range(1, TOP + 1)},
    "margin": lambda rows: rows.best[:, 0] - rows.best[:, 1],
    "top1_logit": lambda rows: rows.top1_logit,
    "entropy": lambda rows: rows.entropy,
    "drawn_prob": lambda rows: rows.drawn_prob,
    "path_logprob": lambda rows: rows.path_logprob,
    "noisy_margin": lambda rows: (rows.best_scores[:, 0] - rows.best_scores[:, 2]).clamp(-BOUND, BOUND),
    "noisy_score": lambda rows: rows.best_scores[:, 0],
    "noisy_lead": lambda rows: (rows.best_scores[:, 0] - rows.best_scores[:, 1]).clamp(-BOUND, BOUND),
    "drawn_token": _ids,
    "above_token": lambda rows: rows.above_token,
    "depth": lambda rows: rows.constant(rows.depth),
    "branch_rank": lambda rows: rows.sibling_rank,
}


def compute(names: Sequence[str], rows: Rows) -> Tensor:
    """Return [R, F] float32, the named features of `rows` in that order."""
    if not names:
        return torch.zeros(rows.logits.shape[0], 0)
    return torch.stack([FORMULAS[name](rows) for name in names], -1).float()


def tokens_of(rows: Rows) -> DrawnTokens:
    """Return the tokens of `rows`, one for each row, as the compiled code is told of them."""
    count = len(rows.logits)

    def column(values: Tensor | None, otherwise: int) -> list[int]:
        return [otherwise] * count if values is None else [int(v) for v in values]

    own, after = column(rows.tokens, 0), column(rows.parents, -1)
    rank, width = column(rows.rank, 0), column(rows.width, 1)
    path = None if rows.parent_logprob is None else rows.parent_logprob.double().numpy()
    return DrawnTokens.of([(i, own[i], after[i], rank[i], width[i], rows.depth) for i in range(count)], path)


def compiled(names: Sequence[str], rows: Rows, device: bool = False) -> Tensor:
    """Return [R, F] float32 as the shipped code has them: by the kernel, or by what serves logits on a `device`."""
    columns, drawn = Columns(names), tokens_of(rows)
    read = summarise_on_device if device else summarise
    summary = read(columns.needs, rows.logits, drawn, rows.temperature, rows.sampled, rows.scores)
    return torch.from_numpy(columns(summary, drawn, rows.temperature))
