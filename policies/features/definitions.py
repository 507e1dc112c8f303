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

A filter that leaves unlikely tokens out (top-k, a nucleus) leaves out others in the target's distribution than in the
draft's. So a token that is left out still counts in a noisy margin, by its log-weight without noise: the target may keep it.
(Without that a nucleus of one token is an infinite margin, which promises acceptance where there is none.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import PolicyError, close_match
from .summary import TOP, Need

INFINITY = float("inf")

BOUND = 30.0
"""The most that a score can lie above or below another: where one token alone can be drawn (top-k 1, a small nucleus, a
grammar) the distance to the next is infinite, and a head would answer that with a number that it never saw in training. Under
shared noise a margin of 30 comes up once in 1e13 draws."""


class Code(enum.IntEnum):
    """Which formula of `kernels.rows.write_columns` a column is; `PROBABILITY + k`: that of the token of rank k."""

    MARGIN = 0
    LARGEST = 1
    ENTROPY = 2
    TOKEN_PROBABILITY = 3
    SAMPLED_PROBABILITY = 4
    PATH = 5
    NOISY_MARGIN = 6
    NOISY_SCORE = 7
    NOISY_LEAD = 8
    TOKEN = 9
    PARENT_TOKEN = 10
    DEPTH = 11
    RANK = 12
    TEMPERATURE = 13
    PROBABILITY = 16  # above all others, by which `write_columns` tells it


class Kind(enum.Enum):
    """When a feature is known."""

    ANCHOR = "anchor"
    PRE = "pre"
    POST = "post"
    HISTORY = "history"


@dataclass(frozen=True)
class Feature:
    """A named scalar: its kind, its definition in words, its range, what it needs, and its formula.

    HISTORY features have no formula here: they are computed from finished rounds (`history`).
    """

    name: str
    kind: Kind
    definition: str
    low: float
    high: float
    need: Need = Need.NOTHING
    code: int = -1  # of a HISTORY feature, which no row of logits is read for

    @property
    def is_probability(self) -> bool:
        """Whether the range is [0, 1]."""
        return self.low == 0.0 and self.high == 1.0


_ONE = Need.LARGEST | Need.SPREAD
_TWO = Need.SECOND | Need.SPREAD


def _ranked(rank: int) -> Feature:
    need = _ONE if rank == 1 else _TWO if rank == 2 else Need.TEN | Need.SPREAD
    said = "best token" if rank == 1 else f"token of rank {rank}"
    return Feature(
        f"top{rank}", Kind.PRE, f"probability of the draft's {said}", 0.0, 1.0, need, Code.PROBABILITY + rank - 1
    )


_ALL = (
    Feature("anchor_entropy", Kind.ANCHOR, "entropy of the target's row that the anchor was drawn from, nats", 0.0,
            INFINITY, _ONE, Code.ENTROPY),
    Feature("anchor_top1", Kind.ANCHOR, "largest probability in that row", 0.0, 1.0, _ONE, Code.PROBABILITY),
    Feature("anchor_margin", Kind.ANCHOR, "largest minus second probability in that row", 0.0, 1.0, _TWO, Code.MARGIN),
    Feature("anchor_prob", Kind.ANCHOR, "probability of the anchor token in that row", 0.0, 1.0, Need.PROBABILITY,
            Code.TOKEN_PROBABILITY),
    Feature("anchor_token", Kind.ANCHOR, "id of the anchor token", 0.0, INFINITY, code=Code.TOKEN),
    Feature("before_token", Kind.ANCHOR, "id of the token before the anchor", -1.0, INFINITY, code=Code.PARENT_TOKEN),
    Feature("temperature", Kind.ANCHOR, "temperature of the sampling, 0 = greedy: the same for a whole run", 0.0,
            INFINITY, code=Code.TEMPERATURE),
    *(_ranked(rank) for rank in range(1, TOP + 1)),
    Feature("margin", Kind.PRE, "largest minus second probability of q_j", 0.0, 1.0, _TWO, Code.MARGIN),
    Feature("top1_logit", Kind.PRE, "raw logit of the draft's best token", -INFINITY, INFINITY, Need.LARGEST,
            Code.LARGEST),
    Feature("entropy", Kind.PRE, "entropy of q_j, nats", 0.0, INFINITY, _ONE, Code.ENTROPY),
    Feature("drawn_prob", Kind.POST, "probability of x_j in the distribution it was drawn from", 0.0, 1.0, Need.SAMPLED,
            Code.SAMPLED_PROBABILITY),
    Feature("path_logprob", Kind.POST, "log-probability of x_1..x_j", -INFINITY, 0.0, Need.PATH, Code.PATH),
    Feature("noisy_margin", Kind.POST, f"log q / T + g of x_j minus that of the best token not drawn, at most {BOUND:.0f}",
            0.0, BOUND, Need.NOISE, Code.NOISY_MARGIN),
    Feature("noisy_score", Kind.POST, "log q / T + g of x_j", -INFINITY, INFINITY, Need.NOISE, Code.NOISY_SCORE),
    Feature("noisy_lead", Kind.POST,
            f"log q / T + g of x_j minus that of the best other token, drawn or not, within +-{BOUND:.0f}", -BOUND,
            BOUND, Need.NOISE, Code.NOISY_LEAD),
    Feature("drawn_token", Kind.POST, "id of x_j", 0.0, INFINITY, code=Code.TOKEN),
    Feature("above_token", Kind.POST, "id of the token that x_j comes after: x_{j-1}, or the anchor", -1.0, INFINITY,
            code=Code.PARENT_TOKEN),
    Feature("depth", Kind.POST, "j", 0.0, INFINITY, code=Code.DEPTH),
    Feature("branch_rank", Kind.POST, "rank of x_j among its siblings, 0 in a chain", 0.0, INFINITY, code=Code.RANK),
    Feature("mean_accepted", Kind.HISTORY, "running mean of min(A, k), weight 0.8 on the past", 0.0, INFINITY),
    Feature("mean_full", Kind.HISTORY, "running mean of full acceptance, weight 0.8 on the past", 0.0, 1.0),
    Feature("last_accepted", Kind.HISTORY, "min(A, k) of the last round", 0.0, INFINITY),
    Feature("last_verified", Kind.HISTORY, "k of the last round", 0.0, INFINITY),
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
