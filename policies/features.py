"""The scalar features of a decision: name, kind, definition, range and one vectorised function each.

| kind | known |
|---|---|
| ANCHOR | before drafting: the target's row that the anchor token was drawn from |
| PRE | with q_j: a function of the context and the draft's distribution at depth j |
| POST | with x_j: uses the drawn token |
| HISTORY | from earlier rounds (`history`): never stored in a trace |

Probability features read the raw logits at temperature 1, whatever the sampling temperature. Only `drawn_prob` reads the
distribution that is sampled from, and the `noisy_*` features that distribution with the Gumbel noise added (at temperature
0 there is no distribution to sample from: `drawn_prob` then reads temperature 1, the `noisy_*` the bare logits).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .errors import PolicyError, close_match

TOP = 10
INFINITY = float("inf")


class Kind(enum.Enum):
    """When a feature is known."""

    ANCHOR = "anchor"
    PRE = "pre"
    POST = "post"
    HISTORY = "history"


class Rows:
    """Rows of logits and what was drawn from them; every derived quantity is computed once, when first read.

    Args:
        logits: [R, V] raw logits, float32 or float64.
        temperature: of the sampling; 0 = greedy.
        scores: [R, V] log q / T + g (logits at temperature 0), what `match` takes the argmax of; None elsewhere.
        tokens: [R] the drawn tokens, for POST features.
        parent_logprob: [R] log-probability of the path above, for POST features.
        depth: j.
        sampled: [R, V] log-weights of the distribution that is sampled from, where it is not softmax(logits / T).
        rank: [R] of the tokens among their siblings; None = each is an only child.
        width: [R] number of siblings, itself included.
        above: [R] the tokens that they stand behind.
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
        above: Tensor | None = None,
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
        self.above = above

    @cached_property
    def above_token(self) -> Tensor:
        """[R] the ids that the tokens stand behind; -1 where that is not known."""
        return self.constant(-1.0) if self.above is None else self.above.to(self.logits.dtype)

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
            raise PolicyError("noisy_* features need the match verification: choose it, or a policy without them")
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


@dataclass(frozen=True)
class Feature:
    """A named scalar: its kind, its definition in words, its range, and the function of `Rows` (or `single.Row`)."""

    name: str
    kind: Kind
    definition: str
    low: float
    high: float
    of: Callable[[Any], Any]

    @property
    def is_probability(self) -> bool:
        """Whether the range is [0, 1]."""
        return self.low == 0.0 and self.high == 1.0


def _history(rows: Any) -> Any:
    raise PolicyError("a HISTORY feature is computed from finished rounds, not from logits")


def _pre(rank: int) -> Feature:
    return Feature(f"top{rank}", Kind.PRE, f"probability of the draft's token of rank {rank}", 0.0, 1.0,
                   lambda rows: (rows.best if rank <= 2 else rows.top)[:, rank - 1])  # fmt: skip


_ALL = (
    Feature("anchor_entropy", Kind.ANCHOR, "entropy of the target's row that the anchor was drawn from, nats", 0.0,
            INFINITY, lambda rows: rows.entropy),
    Feature("anchor_top1", Kind.ANCHOR, "largest probability in that row", 0.0, 1.0, lambda rows: rows.top1),
    Feature("anchor_margin", Kind.ANCHOR, "largest minus second probability in that row", 0.0, 1.0,
            lambda rows: rows.best[:, 0] - rows.best[:, 1]),
    Feature("anchor_prob", Kind.ANCHOR, "probability of the anchor token in that row", 0.0, 1.0,
            lambda rows: rows.drawn_logprob.exp()),
    Feature("anchor_token", Kind.ANCHOR, "id of the anchor token", 0.0, INFINITY,
            lambda rows: rows.tokens.to(rows.logits.dtype)),
    Feature("before_token", Kind.ANCHOR, "id of the token before the anchor", -1.0, INFINITY,
            lambda rows: rows.above_token),
    Feature("temperature", Kind.ANCHOR, "temperature of the sampling, 0 = greedy: the same for a whole run", 0.0,
            INFINITY, lambda rows: rows.constant(rows.temperature)),
    Feature("top1", Kind.PRE, "probability of the draft's best token", 0.0, 1.0, lambda rows: rows.top1),
    *(_pre(rank) for rank in range(2, TOP + 1)),
    Feature("margin", Kind.PRE, "largest minus second probability of q_j", 0.0, 1.0,
            lambda rows: rows.best[:, 0] - rows.best[:, 1]),
    Feature("top1_logit", Kind.PRE, "raw logit of the draft's best token", -INFINITY, INFINITY,
            lambda rows: rows.top1_logit),
    Feature("entropy", Kind.PRE, "entropy of q_j, nats", 0.0, INFINITY, lambda rows: rows.entropy),
    Feature("drawn_prob", Kind.POST, "probability of x_j in the distribution it was drawn from", 0.0, 1.0,
            lambda rows: rows.drawn_prob),
    Feature("path_logprob", Kind.POST, "log-probability of x_1..x_j", -INFINITY, 0.0, lambda rows: rows.path_logprob),
    Feature("noisy_margin", Kind.POST, "log q / T + g of x_j minus that of the best token not drawn", 0.0, INFINITY,
            lambda rows: rows.best_scores[:, 0] - rows.best_scores[:, 2]),
    Feature("noisy_score", Kind.POST, "log q / T + g of x_j", -INFINITY, INFINITY,
            lambda rows: rows.best_scores[:, 0]),
    Feature("noisy_lead", Kind.POST, "log q / T + g of x_j minus that of the best other token, drawn or not", -INFINITY,
            INFINITY, lambda rows: rows.best_scores[:, 0] - rows.best_scores[:, 1]),
    Feature("drawn_token", Kind.POST, "id of x_j", 0.0, INFINITY, lambda rows: rows.tokens.to(rows.logits.dtype)),
    Feature("above_token", Kind.POST, "id of the token that x_j was drawn behind: x_{j-1}, or the anchor", -1.0, INFINITY,
            lambda rows: rows.above_token),
    Feature("depth", Kind.POST, "j", 0.0, INFINITY, lambda rows: rows.constant(rows.depth)),
    Feature("branch_rank", Kind.POST, "rank of x_j among its siblings, 0 in a chain", 0.0, INFINITY,
            lambda rows: rows.sibling_rank),
    Feature("mean_accepted", Kind.HISTORY, "running mean of min(A, k), weight 0.8 on the past", 0.0, INFINITY, _history),
    Feature("mean_full", Kind.HISTORY, "running mean of full acceptance, weight 0.8 on the past", 0.0, 1.0, _history),
    Feature("last_accepted", Kind.HISTORY, "min(A, k) of the last round", 0.0, INFINITY, _history),
    Feature("last_verified", Kind.HISTORY, "k of the last round", 0.0, INFINITY, _history),
)  # fmt: skip

FEATURES: dict[str, Feature] = {feature.name: feature for feature in _ALL}
"""Every feature by name."""

TOKEN_FEATURES = ("before_token", "anchor_token", "drawn_token", "above_token")
"""Ids, which only a head with a table of tokens has a use for (float32 holds them exactly up to 2^24)."""

LEVEL_FEATURES = tuple(f.name for f in _ALL if f.kind in (Kind.ANCHOR, Kind.HISTORY) or f.name == "depth")
"""Those that are the same for all branches of a depth."""

TREE_FEATURES = tuple(f.name for f in _ALL if f.kind in (Kind.PRE, Kind.POST) and f.name not in TOKEN_FEATURES)
"""What is recorded at each node of a tree; the tokens themselves are a column of their own."""

SIBLING_FEATURES = ("noisy_lead", "branch_rank")
"""Those that tell siblings apart: in a chain the same as `noisy_margin`, and 0."""

CHAIN_FEATURES = tuple(name for name in TREE_FEATURES if name not in SIBLING_FEATURES)
"""What is recorded at each node of a chain."""

RUN_FEATURES = ("temperature",)
"""Those that are the same for a whole run: a trace has them in its header."""

ANCHOR_FEATURES = tuple(f.name for f in _ALL if f.kind is Kind.ANCHOR and f.name not in RUN_FEATURES)
"""What is recorded once per anchor."""


def feature(name: str) -> Feature:
    """Return the feature called `name`; an unknown one is a `PolicyError` with the close match."""
    try:
        return FEATURES[name]
    except KeyError:
        raise PolicyError(
            f"unknown feature {name!r}{close_match(name, FEATURES)}; known: {', '.join(FEATURES)}"
        ) from None


def compute(names: Sequence[str], rows: Rows) -> Tensor:
    """Return [R, F] float32, the named features of `rows` in that order: what a trace stores is what a policy sees."""
    if not names:
        return torch.zeros(rows.logits.shape[0], 0, device=rows.logits.device)
    return torch.stack([FEATURES[name].of(rows) for name in names], -1).float()


def single_precision(values: Sequence[float]) -> list[float]:
    """Return the numbers as float32 has them."""
    return array("f", values).tolist()


class Layout:
    """Which columns of a policy's feature tensor each kind fills.

    Attributes:
        names: all of them, in the policy's order.
        anchor, node, history: names of that kind, in the same order (`node` = PRE and POST).
    """

    def __init__(self, names: Sequence[str]) -> None:
        kinds = [feature(name).kind for name in names]
        node_at = [i for i, kind in enumerate(kinds) if kind in (Kind.PRE, Kind.POST)]
        anchor_at = [i for i, kind in enumerate(kinds) if kind is Kind.ANCHOR]
        history_at = [i for i, kind in enumerate(kinds) if kind is Kind.HISTORY]
        self.names = tuple(names)
        self.node = tuple(names[i] for i in node_at)
        self.anchor = tuple(names[i] for i in anchor_at)
        self.history = tuple(names[i] for i in history_at)
        order = [*anchor_at, *history_at, *node_at]
        self._known_first = len(anchor_at) + len(history_at)
        self._back = None if order == sorted(order) else torch.tensor(order).argsort()
        self._order = None if self._back is None else itemgetter(*self._back.tolist())
        self._unknown = [0.0] * len(self.node)

    def base(self, anchor: Tensor, history: Tensor) -> Tensor:
        """Return [S, .], the ANCHOR [S, .] and HISTORY [S, .] columns side by side: what is known at depth 0."""
        return torch.cat([anchor, history.to(anchor.dtype)], -1)

    def step_one(self, base: list[float], nodes: list[float] | None = None) -> list[float]:
        """Return the F features of one stream, rounded to float32, from the values of `base` and of the nodes. See `step`."""
        both = base + (self._unknown if nodes is None else nodes)
        return single_precision(both if self._order is None else self._order(both))

    def columns_few(
        self, base: Sequence[float], columns: Sequence[Sequence[float]], count: int
    ) -> Sequence[Sequence[float]]:
        """Return `step_one` of `count` nodes by columns, from `base` and those of the nodes, all in single precision."""
        both: list[Sequence[float]] = [*([value] * count for value in base), *columns]
        return both if self._order is None else self._order(both)

    def step(self, base: Tensor, nodes: Tensor | None = None) -> Tensor:
        """Return [S, F] in the policy's order: `base`, and the PRE and POST columns [S, .], or zeros at depth 0."""
        if nodes is None:
            nodes = base.new_zeros(base.shape[0], len(self.node))
        both = torch.cat([base, nodes], -1) if self._known_first else nodes
        return both if self._back is None else both.index_select(-1, self._back.to(both.device))
