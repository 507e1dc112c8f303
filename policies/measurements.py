"""Timings by what was timed and by repetition, the costs estimated from them, and how noisy the machine was.

The same function gives the costs of a profile and of each bootstrap draw of it. What is timed (`Key.what`), at each of the
two contexts, and the counts of each (`Key.counts`):

    verify (tokens)                 a verification in a round that may have drafted
    plain ()                        a verification of plain decoding, in separate texts
    first draft (backlog)           the first draft step of a round, which reads so many tokens
    later drafts (drafted)          the other ones of a round that drafted so many, together
    outside (drafted)               all of a round except models and policy
    prefill (prompt tokens)         reading a prompt
    tree verify (tokens)            a verification of a tree
    tree drafts (steps, rows)       all draft steps but the first, which read so many tokens together
    tree outside (drafted)          all of a round of a tree except models and policy
    batch plain (streams)           a round of plain decoding, of several texts side by side
    batch verify (streams, tokens)  a round except drafting and decisions, the streams' anchors included
    batch first draft (streams)     the first draft step of a round
    batch drafts (streams, steps)   the other ones of a round, together
    decisions (calls)               all decisions of a policy in a round

Averages are means, not medians: sums are predicted, and slow moments are a part of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .costs import BatchCosts, BatchTable, Costs, CostTable, Points, read_curve
from .errors import InputError

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]
Series = tuple[tuple[int, ...], ...]
"""Nanoseconds by repetition: whole numbers, which a file reproduces exactly."""

NS = 1e-9
MAX_NS, MAX_COUNT = 10**15, 2**31
"""Limits of what is read from a file; the first is eleven days."""

CONTEXTS = ("short", "long")
DECISIONS, VERIFY = "decisions", "verify"

PLAIN, FIRST, LATER, OUTSIDE, PREFILL = "plain", "first draft", "later drafts", "outside", "prefill"
TREE_VERIFY, TREE_DRAFTS, TREE_OUTSIDE = "tree verify", "tree drafts", "tree outside"
BATCH_PLAIN, BATCH_VERIFY = "batch plain", "batch verify"
BATCH_FIRST, BATCH_DRAFTS = "batch first draft", "batch drafts"

MIN_COUNTS: Mapping[str, tuple[int, ...]] = {
    VERIFY: (0,), PLAIN: (), FIRST: (1,), LATER: (2,), OUTSIDE: (0,), PREFILL: (1,), TREE_VERIFY: (1,),
    TREE_DRAFTS: (1, 1), TREE_OUTSIDE: (0,), DECISIONS: (1,), BATCH_PLAIN: (1,), BATCH_VERIFY: (1, 1), BATCH_FIRST: (1,),
    BATCH_DRAFTS: (1, 1),
}  # fmt: skip
"""The smallest counts of each part."""

LONG_BACKLOG = 8
"""The price of a token of backlog is estimated from first draft steps that read more tokens than this."""

LOST_BLOCKS = 3
"""Blocks fewer than there are that a draw takes. A mean of m out of n blocks drawn with replacement has variance
(n - 1) s^2 / (n m) with the sample's variance s^2; with m = n - 3 it is (n - 1) s^2 / (n (n - 3)), that of Student's t with
n - 1 degrees of freedom."""


class Key(NamedTuple):
    """What was timed.

    Attributes:
        what: the part of a round, such as `verify`; see `estimate`.
        of: the context (`short`, `long`), or the `cost_name` of the policy that decided.
        counts: tokens, rows or calls.
    """

    what: str
    of: str
    counts: tuple[int, ...] = ()


Timings = Mapping[Key, Seconds]
Groups = dict[tuple[int, ...], Seconds]


@dataclass(frozen=True)
class _Record:
    """A series as the file has it; see `Key` and `Series`."""

    what: str
    of: str
    counts: tuple[int, ...]
    ns: Series


@dataclass(frozen=True)
class Measurements:
    """All timings of a profile.

    Attributes:
        series: by what was timed. Series of equal length were measured in turns: a repetition is a period in which all of
            them were timed. Noisy ones may have more repetitions.
    """

    series: Mapping[Key, Series] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.series)

    @cached_property
    def by_repetition(self) -> dict[Key, list[Seconds]]:
        """The seconds of each repetition, by what was timed."""
        return {key: [np.array(ns, dtype=np.float64) * NS for ns in series] for key, series in self.series.items()}

    @cached_property
    def pooled(self) -> dict[Key, Seconds]:
        """The seconds of all repetitions together, by what was timed."""
        return {key: np.concatenate(parts) for key, parts in self.by_repetition.items()}

    def where(self, keep: Callable[[Key], bool]) -> Measurements:
        """Return the series with a key that `keep` accepts."""
        return Measurements({key: series for key, series in self.series.items() if keep(key)})

    def resampled(self, rng: np.random.Generator, length: int = 1) -> Timings:
        """Return a bootstrap draw: repetitions with replacement, the same ones of everything that was timed in them.

        Circular block bootstrap (Politis and Romano 1992) with `LOST_BLOCKS` fewer blocks than there are. Series with fewer
        repetitions are drawn at the same times. A series without timings in the drawn repetitions is taken whole.

        Args:
            rng: of the draw.
            length: repetitions in a block; more than one if slow phases last longer.
        """
        counts = {len(series) for series in self.series.values()}
        places, drawn = rng.random(max(counts, default=1)), {}  # places are shares of the time
        for count in counts:
            step = min(length, count)
            starts = (places[: max(count // step - LOST_BLOCKS, 1)] * count).astype(int)
            drawn[count] = ((starts[:, None] + np.arange(step)) % count).ravel().tolist()
        draw = {key: np.concatenate([parts[n] for n in drawn[len(parts)]]) for key, parts in self.by_repetition.items()}
        return {key: seconds if seconds.size else self.pooled[key] for key, seconds in draw.items()}

    def to_list(self) -> list[dict[str, Any]]:
        """Return the series as JSON values."""
        return [
            {"what": key.what, "of": key.of, "counts": list(key.counts), "ns": [list(ns) for ns in series]}
            for key, series in self.series.items()
        ]

    @staticmethod
    def from_list(raw: Any) -> Measurements:
        """Return the series of their JSON form; raises `ValueError` for anything else."""
        from pydantic import TypeAdapter  # takes 0.1 s to import

        series: dict[Key, Series] = {}
        for record in TypeAdapter(list[_Record]).validate_json(json.dumps(raw), strict=True):
            key, numbers = Key(record.what, record.of, record.counts), [n for ns in record.ns for n in ns]
            if key in series:
                raise ValueError("measurements: a series occurs twice")
            if not numbers or not 0 <= min(numbers) <= max(numbers) <= MAX_NS:
                raise ValueError(f"measurements: {record.what!r}: ns: expected at least one timing, 0 to {MAX_NS}")
            if not all(0 <= count <= MAX_COUNT for count in key.counts):
                raise ValueError(f"measurements: {record.what!r}: counts: expected numbers from 0 to {MAX_COUNT}")
            series[key] = record.ns
        return Measurements(series)


def group(timings: Timings, what: str, of: str | None = None) -> Groups:
    """Return the seconds of a part of a round by counts, ascending: of one context (or policy), None = of both contexts."""
    parts = defaultdict(list)
    for key, seconds in timings.items():
        if key.what == what and of in (None, key.of) and seconds.size:
            parts[key.counts].append(seconds)
    return {counts: np.concatenate(parts[counts]) for counts in sorted(parts)}


def merge_repetitions(repetitions: Sequence[Mapping[Key, Sequence[float]]]) -> Measurements:
    """Return the measurements of repetitions, each of which has seconds by what was timed."""

    def nanoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
        return tuple(np.rint(np.asarray(seconds, dtype=np.float64) / NS).clip(0).astype(np.int64).tolist())

    keys = sorted({key for seconds in repetitions for key in seconds})
    return Measurements({key: tuple(nanoseconds(seconds.get(key, ())) for seconds in repetitions) for key in keys})


def check_measurements(measurements: Measurements) -> Measurements:
    """Return the measurements; raises `ValueError` if costs cannot be estimated from one of them."""
    for (what, of, counts), series in measurements.series.items():
        minima = (1, counts[0]) if what == BATCH_VERIFY and counts else MIN_COUNTS.get(what)  # the anchors are included
        if minima is None or len(counts) != len(minima) or any(n < m for n, m in zip(counts, minima, strict=True)):
            raise ValueError(f"measurements: no cost is estimated from {what!r} of {list(counts)}")
        if what != DECISIONS and of not in CONTEXTS:
            raise ValueError(f"measurements: {what!r} at the context {of!r}, which is neither short nor long")
        if what in (VERIFY, PLAIN, TREE_VERIFY, BATCH_PLAIN, BATCH_VERIFY) and not all(map(all, series)):
            raise ValueError(f"measurements: a verification of {list(counts)} in no time")
    return measurements


def mean(seconds: ArrayLike) -> float:
    """Return the mean of timings; 0 of none."""
    return float(np.asarray(seconds, dtype=np.float64).mean()) if np.size(seconds) else 0.0


def fit_line(timed: Sequence[tuple[Sequence[float], ArrayLike]]) -> list[float]:
    """Return the non-negative least-squares coefficients [C] of timings.

    Args:
        timed: (counts [C], timings) of rounds that consisted of the same.
    """
    from scipy.optimize import nnls  # slow to import, and needed only where costs are estimated

    weight = np.sqrt([np.size(values) for _, values in timed])
    x = np.array([counts for counts, _ in timed], dtype=np.float64) * weight[:, None]  # [G, C]
    y = np.array([mean(values) for _, values in timed]) * weight
    # Tokens come in thousands, rounds one by one: scaled columns condition the problem.
    length = np.linalg.norm(x, axis=0)
    length[length == 0.0] = 1.0
    solution, _ = nnls(x / length, y, maxiter=100 * x.shape[1])
    return [float(value) for value in solution / length]


def mean_per_unit(timed: Sequence[tuple[int, Seconds]]) -> float:
    """Return seconds per unit, a ratio of sums, of timings of so many units each."""
    units = sum(count * seconds.size for count, seconds in timed)
    return float(sum(seconds.sum() for _, seconds in timed)) / units if units else 0.0


def fit_curves(sides: Sequence[Groups]) -> list[Points]:
    """Return for each side the seconds of a call by tokens: never falling, linear between powers of two.

    All sides share the shape of the curve, which is fitted to all timings, and each has its scale. Single sizes come
    up too seldom to be priced alone: the best tree would be the one that was timed in a lucky moment.

    Args:
        sides: timings by (tokens,).
    """
    timed = [(tokens, seconds) for side in sides for (tokens,), seconds in side.items()]
    most = max(tokens for tokens, _ in timed)
    knots = [*(2**k for k in range((most - 1).bit_length())), most]

    def parts(tokens: int) -> list[float]:
        """Return (1, tokens between each two knots): with slopes >= 0 the curve never falls."""
        return [1.0, *(float(np.clip(tokens - low, 0, high - low)) for low, high in pairwise(knots))]

    per_call, *rises = fit_line([(parts(tokens), seconds) for tokens, seconds in timed])
    curve = tuple((n, per_call + float(np.dot(rises, parts(n)[1:]))) for n in knots)
    out = []
    for side in sides:
        expected = sum(float(read_curve(curve, tokens)) * seconds.size for (tokens,), seconds in side.items())
        taken = float(sum(seconds.sum() for seconds in side.values()))
        scale = taken / expected if expected else 1.0
        out.append(tuple((n, scale * seconds) for n, seconds in curve))
    return out


def estimate(timings: Timings, contexts: tuple[float, float], depth: int) -> Costs:
    """Return all costs that timings give.

    Args:
        timings: see the top of this module.
        contexts: tokens in the cache at the short and the long context.
        depth: K, the longest chain.

    Raises:
        InputError: no round was timed.
    """
    low, high = (_chain_table(timings, side, context, depth) for side, context in zip(CONTEXTS, contexts, strict=True))
    outside, prefill = (group(timings, what) for what in (OUTSIDE, PREFILL))
    step_s, round_s = 0.0, mean(next(iter(outside.values()), ()))
    if len(outside) > 1:
        step_s, round_s = fit_line([((drafted, 1), seconds) for (drafted,), seconds in outside.items()])
    constant, slope = fit_line([((1, tokens), s) for (tokens,), s in prefill.items()]) if prefill else (0.0, 0.0)
    tree_outside = None
    if group(timings, TREE_VERIFY):
        curves = fit_curves([group(timings, TREE_VERIFY, side) for side in CONTEXTS])
        low, high = (
            dataclasses.replace(
                table,
                tree_verify_s=((0, table.verify_s[0]), *curve),  # of no tokens: plain decoding
                tree_draft_s=_tree_draft(timings, side),
            )
            for table, curve, side in zip((low, high), curves, CONTEXTS, strict=True)
        )
        timed = group(timings, TREE_OUTSIDE)
        if len(timed) > 1:  # unknowns
            per_round, per_token = fit_line([((1, drafted), seconds) for (drafted,), seconds in timed.items()])
            tree_outside = per_round, 0.0, per_token
    return Costs(
        low, high, step_s, round_s, (constant, slope), decision_prices(timings), tree_outside_s=tree_outside,
        batch=batch_costs(timings, contexts),
    )  # fmt: skip


def _tree_draft(timings: Timings, side: str) -> tuple[float, float] | None:
    """Return the seconds of a draft step of a tree after the first, and of each row after the first; None if not timed."""
    timed = group(timings, TREE_DRAFTS, side) or group(timings, TREE_DRAFTS)
    if not timed:
        return None
    step, row = fit_line([((steps, rows - steps), seconds) for (steps, rows), seconds in timed.items()])
    return step, row


def decision_prices(timings: Timings) -> dict[str, float]:
    """Return the seconds of a decision of each policy, by `cost_name`."""
    names = sorted({key.of for key in timings if key.what == DECISIONS})
    return {name: mean_per_unit([(n, s) for (n,), s in group(timings, DECISIONS, name).items()]) for name in names}


def _chain_table(timings: Timings, side: str, context: float, depth: int) -> CostTable:
    """Return the costs at one context; what was not timed there is taken from both contexts together."""

    def timed(what: str) -> Groups:
        return {**group(timings, what), **group(timings, what, side)}

    verify, first = timed(VERIFY), timed(FIRST)
    later = group(timings, LATER, side) or group(timings, LATER)
    # 0 is a part that was never timed: `or` goes on to the next best source.
    later_s = mean_per_unit([(drafted - 1, seconds) for (drafted,), seconds in later.items()])
    # A drafter that reads anew all that was committed never reads one token alone: its first step reads two.
    one = mean(first.get((1,), first.get((2,), ()))) or later_s
    two = max(mean(first.get((2,), ())) or one, one)  # reading more is never cheaper: a smaller mean is noise
    slopes = [(seconds - two) / (backlog - 2) for (backlog,), seconds in first.items() if backlog > LONG_BACKLOG]
    token = max(mean(np.concatenate(slopes)), 0.0) if slopes else 0.0
    plain = mean(timed(PLAIN).get((), ())) or mean(verify.get((0,), ()))
    seconds = [plain, *(mean(verify.get((n,), ())) for n in range(1, depth + 1))]
    known = [n for n, value in enumerate(seconds) if value > 0]
    if not known:
        raise InputError("profile: no round was timed; give more new tokens or more repeats")
    # A length without timings costs as the nearest one, the longer if in doubt.
    nearest = (min(known, key=lambda k: (abs(k - n), -k)) for n in range(depth + 1))
    return CostTable(context, (one, two), token, tuple(seconds[n] for n in nearest), later_s or one)


def batch_costs(timings: Timings, contexts: tuple[float, float]) -> BatchCosts | None:
    """Return the costs of batches, at contexts of so many tokens; None if no batch was timed."""
    if not group(timings, BATCH_VERIFY) or not (group(timings, BATCH_FIRST) or group(timings, BATCH_DRAFTS)):
        return None
    low, high = (_batch_table(timings, side, context) for side, context in zip(CONTEXTS, contexts, strict=True))
    return BatchCosts(low, high)


def _batch_table(timings: Timings, side: str, context: float) -> BatchTable:
    """Return the costs of batches at one context; what was not timed there is taken from both together."""
    verify: dict[int, dict[int, float]] = defaultdict(dict)
    for of in (None, side):
        for (streams, tokens), seconds in group(timings, BATCH_VERIFY, of).items():
            verify[streams][tokens] = mean(seconds)
        for (streams,), seconds in group(timings, BATCH_PLAIN, of).items():
            verify[streams][streams] = mean(seconds)
    curves = {streams: tuple(sorted(timed.items())) for streams, timed in sorted(verify.items())}
    first = {**group(timings, BATCH_FIRST), **group(timings, BATCH_FIRST, side)}
    drafts = group(timings, BATCH_DRAFTS, side) or group(timings, BATCH_DRAFTS)
    first_s = tuple((n, mean(seconds)) for (n,), seconds in first.items())
    later: dict[int, list[tuple[int, Seconds]]] = defaultdict(list)
    for (streams, steps), seconds in drafts.items():
        later[streams].append((steps, seconds))
    later_s = tuple((streams, mean_per_unit(steps)) for streams, steps in later.items())
    return BatchTable(context, later_s or first_s, curves, first_s)


MIN_TIMINGS = 4
"""Timings for meaningful quartiles, and repetitions for a meaningful trend."""

STALLED = 2.0
"""A timing of more than this multiple of the median is a stall."""

SPREAD, STALLS, PHASES, DRIFT = 0.35, 0.02, 0.15, 0.1
"""The largest figures of a quiet machine; see `Noise`."""

INDEPENDENT_PHASES = 4
"""Repetitions with independent paces that a measurement counts as: slow phases last longer than one repetition. Chosen on
simulated machines (`benchmarks/intervals.py --part machines`): intervals are too narrow with more, too wide with fewer."""

REMEDY = "close other programs and measure again, or raise --budget"


@dataclass(frozen=True)
class Noise:
    """How noisy the machine was.

    Attributes:
        repetitions: number of them.
        spread: interquartile range over median of equal timings, the mean over series weighted by their seconds.
        stalls: share of the seconds that timings took beyond `STALLED` times their median.
        phases: relative difference between the slowest and the fastest repetition.
        drift: relative change from the first repetition to the last along a line; negative = faster.
        block: repetitions in a block of the bootstrap; more than 1 if slow phases last longer.
        pace_spread: standard deviation of the logarithm of the pace over repetitions.
    """

    repetitions: int
    spread: float
    stalls: float
    phases: float
    drift: float
    block: int
    pace_spread: float = 0.0

    @property
    def pace_error(self) -> float:
        """Standard error of the logarithm of the mean pace, compared with another measurement of the same machine."""
        return self.pace_spread / math.sqrt(INDEPENDENT_PHASES)

    @property
    def reasons(self) -> list[str]:
        """What exceeds the figures of a quiet machine."""
        direction = "slower" if self.drift > 0 else "faster"
        figures = (
            (self.spread > SPREAD, f"timings of the same size differed by {self.spread:.0%} between their quartiles"),
            (self.stalls > STALLS, f"stalls took {self.stalls:.0%} of the time"),
            (self.phases > PHASES, f"the slowest repetition took {1.0 + self.phases:.2f} times as long as the fastest"),
            (abs(self.drift) > DRIFT, f"it grew {direction} by {abs(self.drift):.0%} while measuring"),
        )
        return [text for exceeded, text in figures if exceeded]

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy or changed its pace."""
        return bool(self.reasons)

    @property
    def text(self) -> str:
        """One line: the verdict and its figures."""
        if self.is_noisy:
            return f"this machine was busy: {'; '.join(self.reasons)}; {REMEDY}"
        return f"this machine was quiet: spread {self.spread:.2f} in {self.repetitions} repetitions"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and its figures as plain values."""
        figures = asdict(self)
        del figures["block"]
        return {"machine": "busy" if self.is_noisy else "quiet", **figures}


def measure_noise(measurements: Measurements) -> Noise | None:
    """Return how noisy the machine was; None if nothing was timed `MIN_TIMINGS` times."""
    spread = stalls = total = 0.0
    count = max((len(series) for series in measurements.series.values()), default=0)
    taken, usual = np.zeros((2, count))  # seconds by repetition: as measured, and at the median of each series
    for key, parts in measurements.by_repetition.items():
        seconds = measurements.pooled[key]
        if seconds.size < MIN_TIMINGS:
            continue
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
        if median <= 0.0:
            continue
        total += seconds.sum()
        spread += (high - low) / median * seconds.sum()
        stalls += (seconds - STALLED * median).clip(0.0).sum()
        repetition = np.repeat(np.arange(len(parts)), [part.size for part in parts])
        taken += np.bincount(repetition, np.minimum(seconds, STALLED * median), count)
        usual += median * np.bincount(repetition, minlength=count)
    if not total:
        return None
    pace = taken[usual > 0] / usual[usual > 0]
    drift = np.polyfit(np.arange(pace.size), pace, 1)[0] * (pace.size - 1) if pace.size >= MIN_TIMINGS else 0.0
    return Noise(
        len(pace), float(spread / total), float(stalls / total), float(pace.max() / pace.min()) - 1.0,
        float(drift / np.median(pace)), _block_length(pace), float(np.log(pace).std(ddof=1)) if pace.size > 1 else 0.0,
    )  # fmt: skip


def _block_length(pace: Seconds) -> int:
    """Return the block length of Politis and White (2004): twice the lags at which the pace correlates beyond chance."""
    off = pace - pace.mean()
    power = float(off @ off)
    chance = 1.0 / np.sqrt(pace.size)  # standard deviation of correlations of independent repetitions
    shares = [float(off[lag:] @ off[:-lag]) / power if power else 0.0 for lag in range(1, pace.size // 8 + 1)]
    if not shares or shares[0] < 2.0 * chance:
        return 1
    return 2 * len(list(takewhile(lambda share: share > chance, shares)))
