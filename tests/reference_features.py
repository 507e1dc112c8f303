"""A slow reference of the features, and the compiled features of the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from specstop.decode.summaries import summarise, summarise_on_device
from specstop.policies.errors import PolicyError
from specstop.policies.features import BOUND, NO_SCORES, TOP, Columns, DrawnTokens
from torch import Tensor


@dataclass
class Rows:
    """Rows of logits and the token drawn from each.

    Attributes:
        logits: [R, V] raw logits, float32 or float64.
        temperature: 0 = greedy.
        scores: [R, V] log q / T + Gumbel noise (the logits at temperature 0), whose argmax `match` draws.
        tokens: [R] drawn tokens.
        parent_logprob: [R] log-probability of the path to the parent.
        depth: of the drawn tokens.
        sampled: [R, V] log-weights of the distribution that is sampled from; None = logits / T.
        rank: [R] rank among the siblings; None = no siblings.
        width: [R] number of siblings, including the token.
        parents: [R] token ids of the parents; None = unknown.
    """

    logits: Tensor
    temperature: float = 0.0
    scores: Tensor | None = None
    tokens: Tensor | None = None
    parent_logprob: Tensor | None = None
    depth: int = 0
    sampled: Tensor | None = None
    rank: Tensor | None = None
    width: Tensor | None = None
    parents: Tensor | None = None

    def column(self, values: Tensor | float) -> Tensor:
        """Return [R] in the type of the logits."""
        return torch.as_tensor(values, dtype=self.logits.dtype).expand(len(self.logits))

    def largest(self, rank: int) -> Tensor:
        """Return [R], the probability of this rank; 0 beyond the vocabulary."""
        probs = torch.softmax(self.logits, -1)
        return probs.sort(-1, descending=True).values[:, rank - 1] if rank <= probs.shape[-1] else self.column(0.0)

    def of_drawn(self, values: Tensor) -> Tensor:
        """Return [R], the entries of `values` [R, V] at the drawn tokens."""
        assert self.tokens is not None
        return values.gather(-1, self.tokens[:, None])[:, 0]

    def entropy(self) -> Tensor:
        entropy: Tensor = torch.special.entr(torch.softmax(self.logits, -1)).sum(-1)
        return entropy

    def drawn_logprob(self) -> Tensor:
        """Return [R], at temperature 1."""
        return self.of_drawn(torch.log_softmax(self.logits, -1))

    @property
    def path_logprob(self) -> Tensor:
        """[R] log-probability of the path at temperature 1, including the drawn token."""
        assert self.parent_logprob is not None
        return self.parent_logprob + self.drawn_logprob()

    def drawn_prob(self) -> Tensor:
        """Return [R], in the distribution that is sampled from; of the raw logits at temperature 0."""
        weights = self.logits / (self.temperature or 1.0) if self.sampled is None else self.sampled
        return self.of_drawn(torch.softmax(weights, -1))

    def noisy(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noisy score of the drawn token, the largest of another token, and the largest of one not drawn."""
        if self.scores is None:
            raise PolicyError(NO_SCORES)
        best = self.scores.sort(-1, descending=True).values
        width = torch.ones(len(best), dtype=torch.int64) if self.width is None else self.width
        other = best[:, 1] if self.rank is None else torch.where(self.rank > 0, best[:, 0], best[:, 1])
        return self.of_drawn(self.scores), other, best.gather(-1, width[:, None])[:, 0]


FORMULAS: dict[str, Callable[[Rows], Tensor]] = {
    **{f"top{rank}": lambda rows, rank=rank: rows.largest(rank) for rank in range(1, TOP + 1)},
    "margin": lambda rows: rows.largest(1) - rows.largest(2),
    "top1_logit": lambda rows: rows.logits.amax(-1),
    "entropy": Rows.entropy,
    "drawn_prob": Rows.drawn_prob,
    "path_logprob": lambda rows: rows.path_logprob,
    "noisy_margin": lambda rows: (rows.noisy()[0] - rows.noisy()[2]).clamp(-BOUND, BOUND),
    "noisy_score": lambda rows: rows.noisy()[0],
    "noisy_lead": lambda rows: (rows.noisy()[0] - rows.noisy()[1]).clamp(-BOUND, BOUND),
    "drawn_token": lambda rows: rows.column(rows.tokens),
    "above_token": lambda rows: rows.column(-1.0 if rows.parents is None else rows.parents),
    "depth": lambda rows: rows.column(rows.depth),
    "branch_rank": lambda rows: rows.column(0.0 if rows.rank is None else rows.rank),
    "anchor_prob": lambda rows: rows.drawn_logprob().exp(),
    "temperature": lambda rows: rows.column(rows.temperature),
}
SAME = {"anchor_entropy": "entropy", "anchor_top1": "top1", "anchor_margin": "margin", "anchor_token": "drawn_token"}
FORMULAS |= {name: FORMULAS[other] for name, other in {**SAME, "before_token": "above_token"}.items()}


def compute(names: Sequence[str], rows: Rows) -> Tensor:
    """Return [R, F] float32, the reference."""
    return torch.stack([FORMULAS[name](rows) for name in names], -1).float()


def compiled(names: Sequence[str], rows: Rows, device: bool = False) -> Tensor:
    """Return [R, F] float32, by the kernel, or by the code for logits on a `device`."""

    def ids(values: Tensor | None, default: int) -> list[int]:
        return [default] * len(rows.logits) if values is None else values.tolist()

    tokens = zip(ids(rows.tokens, 0), ids(rows.parents, -1), ids(rows.rank, 0), ids(rows.width, 1), strict=True)
    path = None if rows.parent_logprob is None else rows.parent_logprob.double().numpy()
    drawn, columns = DrawnTokens.of([(at, *token, rows.depth) for at, token in enumerate(tokens)], path), Columns(names)
    read = summarise_on_device if device else summarise
    summary = read(columns.needs, rows.logits, drawn, rows.temperature, rows.sampled, rows.scores)
    return torch.from_numpy(columns(summary, drawn, rows.temperature))
