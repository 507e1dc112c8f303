"""Stop rules over the two probabilities of a head: per step, survival, and the rule derived from costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arguments import validate_int
from ..errors import PolicyError
from ..learned.calibration import Array
from ..tree_rules import TreeRule
from .base import ACCEPT, GAIN, SURVIVAL, Lengths, Rule, Times, checked_lengths, checked_times, times_at


class Threshold(Rule):
    """Draft on while `accept` (per step) or S_j (survival; SpecDec++, arXiv 2405.19715) is at least a threshold."""

    def __init__(self, kind: str, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise PolicyError(f"rule {kind}: expected a threshold between 0 and 1, not {threshold}")
        self.kind, self.threshold = kind, threshold
        self.by = SURVIVAL if kind == "survival" else ACCEPT
        self.levels = (np.array([threshold], dtype=np.float64),)

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        return {"kind": self.kind, "threshold": self.threshold}


class AnyFork(Threshold):
    """Draft every branch on while `accept` of any of them is above a threshold.

    DynaSD (arXiv 2409.10644; `continue_decision_check`: any output above the threshold, 0.4 in the scripts, 0.5 by
    default): no memory of the depths before, and a fork that is sure draws the others along. In a chain it is the rule per
    step.
    """

    strict = together = True

    def __init__(self, threshold: float) -> None:
        super().__init__("any", threshold)


class Derived(Rule):
    """Draft on while some further length is worth its time, at the policy's own rate rho.

    With S = S_j and n = `next`, going on to j + m is expected to commit S n (1 + a_{j+2} + a_{j+2} a_{j+3} + ...) more
    tokens, m terms, and costs rho (cost(j + m) - cost(j)) tokens. Since S n stands before the sum, the best m does not depend
    on it: draft on iff S n > tau_j, the least ratio of that cost to that sum. (The one-step rule of optimal stopping under a
    ratio objective, with look-ahead; see `derived_thresholds`.)

    Args:
        thresholds: tau_0 .. tau_{K-1}.
        first: depth of the first decision: 0 to decide before drafting too; a decision saved is time saved where the first
            tokens are nearly always worth drafting. S_j then counts from x_first on, and the thresholds with it.
        lengths: see `Rule`.
        scales: what the thresholds, which are those of one stream, are multiplied by where streams share draft steps and
            verifications; see `base.Times`.
    """

    kind, by, strict = "derived", GAIN, True

    def __init__(self, thresholds: Sequence[float], first: int = 0, lengths: Lengths = (), scales: Times = ()) -> None:
        if not thresholds or not all(t == t for t in thresholds):  # NaN is not equal to itself
            raise PolicyError("rule derived: expected one number for each depth")
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= len(thresholds):
            raise PolicyError(f"rule derived: expected first to be a depth up to {len(thresholds)}, not {first!r}")
        self.thresholds = tuple(float(t) for t in thresholds)
        self.first = first
        self.levels = tuple(np.array([t]) for t in self.thresholds)
        self.lengths, self.scales = checked_lengths(self.kind, lengths), checked_times(self.kind, "scales", scales)

    def threshold_at(self, depth: int, batch: Array) -> Array:
        """See `Rule.threshold_at`."""
        level = super().threshold_at(depth, batch)
        return level * _scales_of(batch.tobytes(), self.scales) if self.scales else level

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        told: dict[str, Any] = {"kind": self.kind, "thresholds": list(self.thresholds), "first": self.first}
        by_size = {"lengths": self.lengths, "scales": self.scales}
        return told | {name: [list(pair) for pair in pairs] for name, pairs in by_size.items() if pairs}


@functools.lru_cache(maxsize=4)  # the same at every depth of a round, and mostly in the next one too
def _scales_of(batch: bytes, scales: tuple[tuple[int, float], ...]) -> Array:
    """Return [S], what the batch of each stream has of `scales`; `batch` as bytes, since arrays have no hash."""
    of = np.frombuffer(batch, dtype=np.int64)
    _, number, streams = np.unique(of, return_inverse=True, return_counts=True)
    return times_at(scales, streams)[number]


class Continuation(Rule):
    """Draft on where the head's second output says that going on saves time.

    That output is no chance of acceptance here but the fitted value of continuing, in tokens: what drafting on and deciding
    as well as may be from there saves against stopping now, decisions paid for. (Optimal stopping by backward regression, as
    in Longstaff and Schwartz 2001; `train.fit.continuation`.)

    Args:
        margin: tokens that must be expected to be saved.
        first: depth of the first decision.
        remembers: the head reads the features of the depth before too (`continuation.ContinuationPolicy`).
    """

    kind = "continuation"

    def __init__(self, margin: float = 0.0, first: int = 0, remembers: bool = False) -> None:
        if not -math.inf < margin < math.inf:
            raise PolicyError(f"rule continuation: expected a number as margin, not {margin}")
        if not isinstance(remembers, bool):
            raise PolicyError(f"rule continuation: expected true or false for remembers, not {remembers!r}")
        self.margin, self.remembers = float(margin), remembers
        self.first = validate_int("rule continuation", "first", first, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        return {"kind": self.kind, "margin": self.margin, "first": self.first, "remembers": self.remembers}


class BatchRule(Rule):
    """Draft and send the tokens of the whole batch that are worth their time; see `joint.survival`, which decides.

    Args:
        send: `best` = of what was drafted only what is worth its verification; `all` = whatever was drafted, which needs no
            leave of the verification: how far streams draft is decided by the same weighing.
        rates: (streams, times) rising, what the policy's own rate in a batch of so many streams is of the best fixed
            length's; as that one where there are none.
        first: depth of the first decision: so many tokens are drafted without one. 0 leaves plain decoding as a choice.
        lengths: see `Rule`; at the other sizes of `rates` it decides.
    """

    kind = "batch"

    def __init__(
        self,
        send: str = "best",
        rates: Times = (),
        first: int = 0,
        lengths: Lengths = (),
    ) -> None:
        self.first = validate_int("rule batch", "first", first, 0)
        if send not in ("best", "all"):
            raise PolicyError(f"rule batch: expected best or all for send, not {send!r}")
        self.send = send
        self.rates = checked_times(self.kind, "rates", rates)
        self.lengths = checked_lengths(self.kind, lengths)

    def settled(self) -> dict[int, int | None]:
        """See `Rule.settled`."""
        every: dict[int, int | None] = {streams: None for streams, _ in self.rates}
        return dict(sorted((every | dict(self.lengths)).items()))

    def times(self, streams: Array) -> Array:
        """Return [n] what the best fixed length's rate in batches of so many streams [n] is multiplied by."""
        return times_at(self.rates, streams)

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved."""
        told = {
            "rates": [list(pair) for pair in self.rates],
            "first": self.first,
            "lengths": [list(pair) for pair in self.lengths],
        }
        return {"kind": self.kind, "send": self.send, **{name: value for name, value in told.items() if value}}


def derived_thresholds(rho: float, costs: Array, acceptance: Sequence[float]) -> list[float]:
    """Return tau_0 .. tau_{K-1} of the derived rule.

    Args:
        rho: tokens per second of the policy itself.
        costs: [K + 1] float64, seconds of a round that drafts k = 0..K tokens.
        acceptance: a_1 .. a_K, mean conditional acceptance by depth.
    """
    depth = len(costs) - 1
    a = np.array(acceptance[:depth], dtype=np.float64)
    thresholds = []
    for j in range(depth):
        # 1, 1 + a_{j+2}, 1 + a_{j+2} + a_{j+2} a_{j+3}, ...: what m = 1, 2, ... further tokens bring for each S_j next_j.
        tokens = np.cumsum(np.append(1.0, np.cumprod(a[j + 1 :])))  # [K - j]
        thresholds.append(float((rho * (costs[j + 1 :] - costs[j]) / tokens).min()))
    return thresholds


THRESHOLDED: dict[str, Callable[[float], Rule]] = {
    "survival": partial(Threshold, "survival"),
    "step": partial(Threshold, "step"),
    "any": AnyFork,
}
"""The rules that a threshold is all of, by kind: `train` finds the one that replays fastest."""


def build_rule(raw: Mapping[str, Any]) -> Rule:
    """Return the rule saved as `raw`; an unknown or mangled one is a `PolicyError`."""
    try:
        if raw["kind"] in THRESHOLDED:
            return THRESHOLDED[raw["kind"]](float(raw["threshold"]))
        if raw["kind"] == "derived":
            taus = [float(t) for t in raw["thresholds"]]
            return Derived(taus, raw["first"], raw.get("lengths", ()), raw.get("scales", ()))
        if raw["kind"] == "continuation":
            return Continuation(float(raw["margin"]), raw["first"], raw["remembers"])
        if raw["kind"] == "batch":
            return BatchRule(raw["send"], raw.get("rates", ()), raw.get("first", 0), raw.get("lengths", ()))
        if raw["kind"] == "gain":
            return TreeRule(**{name: value for name, value in raw.items() if name != "kind"})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PolicyError(f"rule: {raw!r} lacks or mangles {error}") from None
    known = ", ".join([*THRESHOLDED, "derived", "continuation", "batch or gain"])
    raise PolicyError(f"unknown rule {raw['kind']!r}; expected {known}")
