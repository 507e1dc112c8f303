"""From rows of logits to columns: one pass over the vocabulary, and the formulas of the features from what it found.

In one file, since numba asks only whether the file of a kernel has changed before it takes what it compiled earlier.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..features.definitions import BOUND, Code
from ..features.summary import TOP
from .compiled import any_order, exact, kernel

LEAST = np.float32(-87.0)
"""Below the largest logit by this much a token weighs 1e-38 of it: nothing, in single precision. A masked token
(-infinity) counts as one of these, so that no 0 times infinity gets into the entropy."""

_LOG2E = np.float32(1.4426950408889634)
# ln 2 as a sum (Cody and Waite): the first part has nine bits, so that its product with `whole` is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_HALF, _ONE, _BIAS = np.float32(0.5), np.float32(1.0), np.int32(127)
_BLOCK = 64
"""Entries that are looked at, or added up, at a time."""

_MARGIN, _LARGEST, _ENTROPY = int(Code.MARGIN), int(Code.LARGEST), int(Code.ENTROPY)
_TOKEN_PROBABILITY, _SAMPLED, _PATH = int(Code.TOKEN_PROBABILITY), int(Code.SAMPLED_PROBABILITY), int(Code.PATH)
_NOISY_MARGIN, _NOISY_SCORE, _NOISY_LEAD = int(Code.NOISY_MARGIN), int(Code.NOISY_SCORE), int(Code.NOISY_LEAD)
_TOKEN, _PARENT, _DEPTH, _RANK = int(Code.TOKEN), int(Code.PARENT_TOKEN), int(Code.DEPTH), int(Code.RANK)
_PROBABILITY = int(Code.PROBABILITY)


@exact
def _exp(x: Any) -> Any:
    """Return e^x for -87 <= x <= 0, to 2 units in the last place.

    The polynomial of Cephes. `math.exp` in its place keeps the compiler from working on eight numbers at a time: a row
    of 3,072 logits takes 59 us in the place of 10.
    """
    whole = np.floor(x * _LOG2E + _HALF)  # -126 .. 0, so that 2^whole is a normal number
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW  # e^x = 2^whole e^r, |r| <= ln 2 / 2
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32((np.int32(whole) + _BIAS) << np.int32(23)).view(np.float32)  # 2^whole, by its bits
    return (p * r * r + r + _ONE) * power  # e^r = 1 + r + r^2 p(r)


@any_order
def _largest(block: Any) -> Any:
    """Return the largest of a block."""
    most = block[0]
    for i in range(block.shape[0]):
        most = max(most, block[i])
    return most


@exact
def _largest_of_row(row: Any) -> Any:
    """Return the largest of a row, each place of a block by itself first: of 2,048 in 0.3 us, which in one go take 2."""
    most, whole = np.full(_BLOCK, row[0], np.float32), row.shape[0] - row.shape[0] % _BLOCK
    for start in range(0, whole, _BLOCK):
        block = row[start : start + _BLOCK]
        for k in range(_BLOCK):
            most[k] = block[k] if block[k] > most[k] else most[k]
    for k in range(row.shape[0] - whole):
        most[k] = max(most[k], row[whole + k])
    return _largest(most)


@any_order
def _rank(row: Any, count: Any, best: Any) -> None:
    """Fill `best` with the `count` largest of a row in falling order, and -infinity after them.

    Blocks whose largest number is not among them are passed over, which is nearly all: only the maximum of a block is
    worked out eight numbers at a time.
    """
    best[:] = -np.inf
    last = count - 1
    for start in range(0, row.shape[0], _BLOCK):
        block = row[start : start + _BLOCK]
        if not _largest(block) > best[last]:
            continue
        for i in range(block.shape[0]):
            value = block[i]
            if value > best[last]:
                at = last
                while at > 0 and value > best[at - 1]:
                    best[at] = best[at - 1]
                    at -= 1
                best[at] = value


@exact
def _spread(row: Any, most: Any, scale: Any) -> Any:
    """Return the sum of e^d over a row, and that of e^d d, d = (entry - most) scale.

    Each place of a block has sums of its own: so the order of additions is written down, and yet the compiler can work on
    many at a time. Left to it, the order was another one in each kernel that this is a part of, and another one in the
    process that compiled a kernel than in those that read it from numba's cache.
    """
    # Single precision within a place, which adds up a 64th of the row; double precision over the places.
    sums, weighted, whole = (
        np.zeros(_BLOCK, np.float32),
        np.zeros(_BLOCK, np.float32),
        row.shape[0] - row.shape[0] % _BLOCK,
    )
    for start in range(0, whole, _BLOCK):
        block = row[start : start + _BLOCK]
        for k in range(_BLOCK):
            below = max((block[k] - most) * scale, LEAST)
            power = _exp(below)
            sums[k] += power
            weighted[k] += power * below
    for k in range(row.shape[0] - whole):
        below = max((row[whole + k] - most) * scale, LEAST)
        power = _exp(below)
        sums[k] += power
        weighted[k] += power * below
    total, total_weighted = 0.0, 0.0
    for k in range(_BLOCK):
        total += sums[k]
        total_weighted += weighted[k]
    return total, total_weighted


@kernel(
    "void(float32[:,::1], int64, boolean, float32[:,::1], int64, float32[:,::1], float64, int64[:,::1], float64[::1], "
    "float64[::1], float32[:,::1], float64[:,::1], float32[:,::1], float64[:,::1])"
)
def read_rows(
    logits: Any, ranks: int, spread: bool, scores: Any, most: int, sampled: Any, scale: float, ids: Any,
    parent_path: Any, lead: Any, top: Any, stats: Any, best: Any, numbers: Any,
) -> None:  # fmt: skip
    """Read rows of logits, each once, and once more where the sampled distribution or the noisy scores are other numbers.

    Args:
        logits: [R, V], raw.
        ranks: how many of the largest are wanted; 0 = the raw logits are not read.
        spread: whether log-sum-exp and entropy are wanted.
        scores: [R, V] that the tokens are the largest of.
        most: how many of the largest of these are wanted; 0 = none.
        sampled: [R, V], its softmax after times `scale` is the distribution that is sampled from.
        scale: 0 = that distribution is softmax(logits), or is not wanted.
        ids: [B, 6] of the drawn tokens; see `features.Drawn`.
        parent_path: [B] log-probabilities of the paths to their parents; none = 0.
        lead: [B], see `features.Drawn`; none = infinite.
        top, stats, best, numbers: are written; see `features.Summary`.
    """
    for r in range(logits.shape[0] if ranks > 0 else 0):
        row = logits[r]
        if ranks > 1:
            _rank(row, min(ranks, row.shape[0]), top[r])
        else:
            top[r, 0] = _largest_of_row(row)  # the other ranks stay unwritten: no feature of the plan reads them
        if spread:
            # With d = logit - largest and Z = sum e^d the entropy is ln Z - (sum e^d d) / Z; rounding may take it below 0.
            total, weighted = _spread(row, top[r, 0], np.float32(1.0))
            stats[r, 0] = np.log(total)
            stats[r, 1] = max(np.log(total) - weighted / total, 0.0)
    for r in range(scores.shape[0] if most > 0 else 0):
        _rank(scores[r], min(most, scores.shape[1]), best[r])
    for b in range(ids.shape[0]):
        numbers[b, 3] = lead[b] if lead.shape[0] else np.inf
    if not spread and scale == 0.0:
        return
    read, norm, largest = -1, 0.0, np.float32(0.0)
    for b in range(ids.shape[0]):
        r, token = ids[b, 0], ids[b, 1]
        if spread:
            numbers[b, 0] = np.float64(logits[r, token] - top[r, 0]) - stats[r, 0]
            numbers[b, 1] = numbers[b, 0]
            numbers[b, 2] = numbers[b, 0] + (parent_path[b] if parent_path.shape[0] else 0.0)
        if scale != 0.0:
            if r != read:  # tokens of one row follow one another
                read, largest = r, _largest_of_row(sampled[r])
                norm = np.log(_spread(sampled[r], largest, np.float32(scale))[0])
            # By its own norm: `sampled` are log-weights, of any sum.
            numbers[b, 1] = np.float64(sampled[r, token] - largest) * scale - norm


@exact
def _probability(top: Any, norm: Any, rank: Any) -> Any:
    """Return the probability of the token of this rank; 0 beyond the vocabulary, where `top` is -infinity."""
    return np.exp(np.float64(top[rank]) - np.float64(top[0]) - norm)


@exact
def _bounded(margin: Any) -> Any:
    return min(max(margin, -BOUND), BOUND)


@kernel(
    "void(int64[::1], int64[::1], float32[:,::1], float64[:,::1], float32[:,::1], int64[:,::1], float64[:,::1], float64, "
    "float32[:,::1])"
)
def write_columns(
    codes: Any, at: Any, top: Any, stats: Any, best: Any, ids: Any, numbers: Any, temperature: float, out: Any
) -> None:
    """Write F columns of B tokens.

    Args:
        codes: [F], see `Code`.
        at: [F] the column of `out` that each goes to.
        top, stats: [R, .] of the rows; see `read_rows`.
        best: [R, m] noisy scores of the rows in falling order, the drawn ones first.
        ids: [B, 6] of each token: its row, its id, its parent's, its rank among its siblings, their number, its depth.
        numbers: [B, 4]: its log-probability, the one in the distribution that is sampled from, that of its path, and how far
            it is ahead of the tokens that a filter left out.
        temperature: of the sampling.
        out: [B, .].
    """
    last = best.shape[1] - 1
    for b in range(ids.shape[0]):
        r, rank = ids[b, 0], ids[b, 3]
        for f in range(codes.shape[0]):
            code = codes[f]
            if code >= _PROBABILITY:
                value = _probability(top[r], stats[r, 0], code - _PROBABILITY)
            elif code == _MARGIN:
                value = _probability(top[r], stats[r, 0], 0) - _probability(top[r], stats[r, 0], 1)
            elif code == _LARGEST:
                value = np.float64(top[r, 0])
            elif code == _ENTROPY:
                value = stats[r, 1]
            elif code == _TOKEN_PROBABILITY:
                value = np.exp(numbers[b, 0])
            elif code == _SAMPLED:
                value = np.exp(numbers[b, 1])
            elif code == _PATH:
                value = numbers[b, 2]
            elif code == _NOISY_SCORE:
                value = np.float64(best[r, rank])
            elif code == _NOISY_MARGIN:  # to the best token that was not drawn
                ahead = np.float64(best[r, rank]) - np.float64(best[r, min(ids[b, 4], last)])
                value = _bounded(min(ahead, numbers[b, 3]))
            elif code == _NOISY_LEAD:  # to the best other token, a sibling or not
                ahead = np.float64(best[r, rank]) - np.float64(best[r, 0 if rank > 0 else 1])
                value = _bounded(min(ahead, numbers[b, 3]))
            elif code == _TOKEN:
                value = np.float64(ids[b, 1])
            elif code == _PARENT:
                value = np.float64(ids[b, 2])
            elif code == _DEPTH:
                value = np.float64(ids[b, 5])
            elif code == _RANK:
                value = np.float64(rank)
            else:  # `Code.TEMPERATURE`
                value = temperature
            out[b, at[f]] = value


@kernel(
    "void(float32[:,::1], int64, boolean, float32[:,::1], int64, boolean, float32[:,::1], float32[:,::1], float64, "
    "int64[:,::1], float64[::1], float64[::1], int64[::1], int64[::1], float64, float64[::1], float32[:,::1])"
)
def read_columns(
    logits: Any, ranks: int, spread: bool, scores: Any, most: int, shared: bool, best: Any, sampled: Any, scale: float,
    ids: Any, parent_path: Any, lead: Any, codes: Any, at: Any, temperature: float, path: Any, out: Any,
) -> None:  # fmt: skip
    """Read rows of logits and write columns of the tokens drawn from them, in one call: one costs less than its arguments.

    Args:
        logits, ranks, spread, scores, most, sampled, scale, ids, parent_path, lead: see `read_rows`.
        shared: the largest of the logits are the noisy scores.
        best: [R, m], those of the noisy scores where they are known; else none.
        codes, at, temperature, out: see `write_columns`.
        path: [B] is written, the log-probability of each path; none = nobody follows it.
    """
    rows, tokens = logits.shape[0], ids.shape[0]
    top, stats, numbers = np.empty((rows, TOP), dtype=np.float32), np.empty((rows, 2)), np.empty((tokens, 4))
    if shared:
        best = top  # greedy decoding, whose scores are the logits
    elif not best.shape[0]:
        best = np.empty((rows, max(most, 1)), dtype=np.float32)  # one unread column where no noisy score is wanted
    read_rows(logits, ranks, spread, scores, most, sampled, scale, ids, parent_path, lead, top, stats, best, numbers)
    write_columns(codes, at, top, stats, best, ids, numbers, temperature, out)
    for b in range(path.shape[0]):
        path[b] = numbers[b, 2]
