"""Stop rules of learned policies on chains: thresholds, the derived rule, fitted values of continuing, and batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .contract import Array
from .costs import MAX_STREAMS
from .errors import PolicyError

SURVIVAL, ACCEPT, NEXT, GAIN = range(4)
"""Values that a rule compares with its threshold; see `kernels.heads.decide`."""

THRESHOLD_RULES = ("survival", "step", "any")
"""Kinds of `Threshold`."""

Lengths = Sequence[tuple[int, int | None]]
Factors = Sequence[tuple[int, float]]


class Rule:
    """Keeps the branches that pass a threshold. Entries by batch size are in ascending order."""

    kind: str  # name in a policy folder
    first: int = 1  # depth of the first decision
    compared: int = SURVIVAL  # see `kernels.heads.decide`
    strict: bool = False  # values equal to the threshold do not pass
    keep_all: bool = False  # all branches of a stream pass if one does
    levels: tuple[Array, ...] = (np.zeros(1),)  # thresholds by depth, [1] or by stream [S]; the last one for the rest
    # Tokens that are drafted without a decision, because it would cost more than it gains; None = the rule decides.
    lengths: Lengths = ()  # by batch size
    scales: Factors = ()  # factors of the thresholds by batch size
    rates: Factors = ()  # the policy's rate over that of the best fixed length by batch size

    def __post_init__(self) -> None:
        check_depth(self.kind, "first", self.first)
        self.lengths = _check_pairs(self.kind, self.lengths, int)
        self.scales, self.rates = (_check_pairs(self.kind, factors, float) for factors in (self.scales, self.rates))

    def threshold_at(self, depth: int, batch: Array) -> Array:
        """Return the threshold at a depth, [1] for all streams or [S], given `DraftStep.batch`."""
        level = self.levels[depth] if depth < len(self.levels) else self.levels[-1]
        return level * _scale_by_stream(batch.tobytes(), tuple(self.scales)) if self.scales else level

    def unasked(self) -> dict[int, int]:
        """Return the tokens drafted without a decision, by number of streams: those of the next listed batch size.

        The rule decides if that size is more than twice as large.
        """
        # At the sizes that have a rate but no length the rule decides.
        sizes = {**dict.fromkeys(size for size, _ in self.rates), **dict(self.lengths)}
        out, below = dict[int, int](), 0
        for size, tokens in sorted(sizes.items()):
            if tokens is not None:
                out |= dict.fromkeys(range(max(below + 1, -(-size // 2)), size + 1), tokens)
            below = size
        return out

    @property
    def undecided(self) -> str:
        """The batch sizes without decisions and their draft lengths, as text."""
        return ", ".join(f"{size} (drafts {tokens})" for size, tokens in self.lengths if tokens is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as it is saved; empty tuples are left out."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{name: _to_lists(value) for name, value in entries.items() if value != ()}}


@dataclass(eq=False)
class Threshold(Rule):
    """Continue while a probability is at least a threshold.

    Kinds: `step` compares `accept`; `survival` compares S_j (SpecDec++, arXiv 2405.19715); `any` keeps all branches of a
    depth while `accept` of one is above the threshold (DynaSD, arXiv 2409.10644, `continue_decision_check`).
    """

    kind: str
    threshold: float

    def __post_init__(self) -> None:
        self.threshold = float(self.threshold)
        if not 0.0 <= self.threshold <= 1.0:
            raise PolicyError(f"rule {self.kind}: expected a threshold between 0 and 1, not {self.threshold}")
        self.compared = SURVIVAL if self.kind == "survival" else ACCEPT
        self.strict = self.keep_all = self.kind == "any"
        self.levels = (np.array([self.threshold]),)


@dataclass(eq=False)
class Derived(Rule):
    """Continue while a further length is worth its time, at the policy's rate rho (METHODS D3).

    With S = S_j and n = `next`, continuing to depth j + m is expected to commit S n (1 + a_{j+2} + a_{j+2} a_{j+3} + ...)
    more tokens, m terms, and costs rho (cost(j + m) - cost(j)) tokens. The best m does not depend on the factor S n:
    continue iff S n > tau_j, the smallest ratio of that cost to that sum. (One-step rule of optimal stopping under a ratio
    objective, with look-ahead; see `derived_thresholds`.)

    `thresholds` are tau_0 .. tau_{K-1}, for one stream; `first` 0 decides before drafting too, and S_j is the product from
    x_first on.
    """

    thresholds: Sequence[float]
    first: int = 0
    lengths: Lengths = ()
    scales: Factors = ()
    kind, compared, strict = "derived", GAIN, True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thresholds = tuple(float(t) for t in self.thresholds)
        if not self.thresholds or any(math.isnan(t) for t in self.thresholds):
            raise PolicyError("rule derived: expected one number for each depth")
        check_depth(self.kind, "first", self.first, len(self.thresholds))
        self.levels = tuple(np.array(self.thresholds)[:, None])


@dataclass(eq=False)
class BatchRule(Rule):
    """Draft and send the tokens of a batch that are worth their time; see `batch_rules.BatchStop`."""

    send: str = (
        "best"  # sends drafted tokens that are worth their verification; "all", which every mode permits, sends all
    )
    rates: Factors = ()
    first: int = 0  # includes plain decoding
    lengths: Lengths = ()
    kind = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.send not in ("best", "all"):
            raise PolicyError(f"rule batch: expected best or all for send, not {self.send!r}")

    def to_dict(self) -> dict[str, Any]:
        """See `Rule.to_dict`; a `first` of 0 is not saved."""
        return {name: value for name, value in super().to_dict().items() if value}


@functools.lru_cache(maxsize=4)  # the same at each depth of a round, and usually in the next round
def _scale_by_stream(batch: bytes, scales: tuple[tuple[int, float], ...]) -> Array:
    """Return [S], the factor for the batch of each stream; `batch` as bytes, since arrays have no hash."""
    _, number, streams = np.unique(np.frombuffer(batch, dtype=np.int64), return_inverse=True, return_counts=True)
    return interpolate_factors(scales, streams)[number]


def interpolate_factors(factors: Factors, streams: Array) -> Array:
    """Return [n] factors at batch sizes [n]: linear between the listed sizes, constant beyond them; 1 if there are none."""
    sizes, values = zip(*factors, strict=True) if factors else ((1,), (1.0,))
    out: Array = np.interp(streams, sizes, values)
    return out


def _to_lists(value: Any) -> Any:
    return [_to_lists(item) for item in value] if isinstance(value, tuple) else value


def check_depth(kind: str, name: str, value: Any, high: float = math.inf) -> None:
    """Raise `PolicyError` unless an entry of a rule is a whole number from 0 to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise PolicyError(f"rule {kind}: expected for {name} a whole number from 0 to {high:g}, not {value!r:.80}")


def _check_pairs(kind: str, pairs: Sequence[tuple[Any, Any]], of: type[int | float]) -> tuple[tuple[int, Any], ...]:
    """Return [streams, value] pairs as tuples: `int` lengths, which may be None, or `float` factors."""
    out = tuple((int(size), None if value is None and of is int else of(value)) for size, value in pairs)
    sizes, values = [size for size, _ in out], [value for _, value in out if value is not None]
    valid = all(value >= 0 if of is int else 0.0 < value < math.inf for value in values)
    if not valid or sizes != sorted({size for size in sizes if 0 < size <= MAX_STREAMS}):
        raise PolicyError(
            f"rule {kind}: expected [streams, value], streams rising and values positive, not {out!r:.80}"
        )
    return out
