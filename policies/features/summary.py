"""The row summary: all that features need of rows of logits, from one pass over the vocabulary.

Logits on the host are read by a compiled kernel (`kernels.rows`); where they lie on a device, `decode.summaries`
fills the same record with the device's operations.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PolicyError
from ..kernels import on_first_use

Array = np.ndarray[Any, Any]

TOP = 10
"""The most ranks of a row that features speak of."""


class Need(enum.Flag):
    """What a feature needs of a row, or of the host that has it."""

    NOTHING = 0
    LARGEST = enum.auto()
    SECOND = enum.auto()
    TEN = enum.auto()
    SPREAD = enum.auto()
    PROBABILITY = enum.auto()
    SAMPLED = enum.auto()
    PATH = enum.auto()
    NOISE = enum.auto()


Token = tuple[int, int, int, int, int, int]
"""A drawn token: its row, its id, its parent's (-1 = unknown), its rank among its siblings, their number, its depth."""


@dataclass(slots=True)
class Drawn:
    """B tokens drawn from R rows of logits; those of one row follow one another, in the order in which they were drawn.

    Attributes:
        ids: [B, 6] int64, each a `Token`.
        parent_path: [B] float64 log-probability of the path to its parent, where a path is followed.
        lead: [B] float64, how far its log-weight is ahead of that of the likeliest token which a filter (top-k, a nucleus)
            left out; None = no filter.
    """

    ids: Array
    parent_path: Array | None = None
    lead: Array | None = None

    @classmethod
    def of(cls, tokens: Sequence[Token], parent_path: Array | None = None) -> Drawn:
        """Return these tokens."""
        return cls(np.array(tokens, dtype=np.int64).reshape(len(tokens), 6), parent_path)


@dataclass(slots=True)
class Summary:
    """What features are made of.

    Attributes:
        top: [R, 10] float32, the largest raw logits in falling order, as many as are needed.
        stats: [R, 2] float64, log sum exp(logit - largest) and the entropy in nats.
        best: [R, m] float32, the noisy scores in falling order, the drawn ones first.
        numbers: [B, 4] float64, the log-probability of each drawn token at temperature 1, that in the distribution which is
            sampled from, that of its path, and `Drawn.lead`.
    """

    top: Array
    stats: Array
    best: Array
    numbers: Array

    @property
    def path(self) -> Array:
        """[B] float64, the log-probability of each path, for the tokens drawn after it."""
        path: Array = self.numbers[:, 2]
        return path


NO_SCORES = "noisy_* features need the match verification: choose it, or a policy without them"


class Plan:
    """What is read of rows for some features, found out once: questions to an enumeration cost more than the reading.

    Attributes:
        ranks: how many of the largest logits; 0 = the raw logits are not read.
        spread: whether log-sum-exp and entropy.
        noisy: whether noisy scores.
        sampled: whether the probability of a token in the distribution that is sampled from.
        path: whether log-probabilities of paths.
    """

    __slots__ = ("need", "noisy", "path", "ranks", "sampled", "spread")

    def __init__(self, need: Need) -> None:
        self.need = need
        self.noisy, self.sampled, self.path = Need.NOISE in need, Need.SAMPLED in need, Need.PATH in need
        self.spread = bool(need & (Need.SPREAD | Need.PROBABILITY | Need.SAMPLED | Need.PATH))
        # Log-sum-exp and entropy are taken below the largest logit, so they need that one at least.
        self.ranks = TOP if Need.TEN in need else 2 if Need.SECOND in need else int(self.spread or Need.LARGEST in need)

    def __or__(self, need: Need) -> Plan:
        """Return the plan that reads for `need` as well."""
        return Plan(self.need | need)


kernels = on_first_use("rows")

_NOTHING = np.zeros((1, TOP), dtype=np.float32)  # stands for scores that nothing reads
NONE = np.zeros(0)
"""No paths, no leads."""


def wanted(
    plan: Plan, temperature: float, drawn: Drawn, logits: Array, sampled: Array | None, scores: Array | None,
    best: Array | None,
) -> tuple[int, int, bool, float]:  # fmt: skip
    """Return what `kernels.rows.read_rows` is asked for: ranks, most, whether the ranks serve for both, and scale.

    Args:
        plan, temperature, drawn, logits, sampled, scores, best: see `summarise`.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    scale = 0.0  # that distribution is softmax(logits); at temperature 0 features read it as at 1
    if plan.sampled and (sampled is not None or temperature not in (0.0, 1.0)):
        scale = 1.0 if sampled is not None else 1.0 / temperature
    if not plan.noisy or best is not None:
        return plan.ranks, 0, False, scale
    if scores is None:
        raise PolicyError(NO_SCORES)
    ids = drawn.ids
    # The drawn ones and the best one left out. A token alone has no siblings, so that its record need not be asked.
    most = 2 if len(ids) == 1 else max(int(ids[:, 4].max()) + 1, 2)
    if scores is logits and most <= TOP:  # greedy: one ranking serves for both
        return max(plan.ranks, most), 0, True, scale
    return plan.ranks, most, False, scale


def summarise(
    plan: Plan,
    logits: Array,
    drawn: Drawn,
    temperature: float,
    sampled: Array | None = None,
    scores: Array | None = None,
    best: Array | None = None,
) -> Summary:
    """Read rows of logits that lie on the host.

    Args:
        plan: for all features that will be asked for.
        logits: [R, V] float32, raw.
        drawn: from these rows.
        temperature: of the sampling; 0 = greedy.
        sampled: [R, V] log-weights of the distribution that is sampled from, where it is not softmax(logits / T).
        scores: [R, V] log q / T + g (the logits, greedy), what `match` takes the largest of; None elsewhere.
        best: [R, m] the largest of them, where they are known.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    count, ids = len(logits), drawn.ids
    top, stats, numbers = np.empty((count, TOP), dtype=np.float32), np.empty((count, 2)), np.empty((len(ids), 4))
    ranks, most, shared, scale = wanted(plan, temperature, drawn, logits, sampled, scores, best)
    if shared:
        best = top
    elif best is None:
        best = np.empty((count, most), dtype=np.float32) if most else _NOTHING
    kernels().read_rows(
        logits,
        ranks,
        plan.spread,
        logits if scores is None else scores,
        most,
        logits if sampled is None else sampled,
        scale,
        ids,
        NONE if drawn.parent_path is None else drawn.parent_path,
        NONE if drawn.lead is None else drawn.lead,
        top,
        stats,
        best,
        numbers,
    )
    return Summary(top, stats, best, numbers)
