"""Features: one pass over rows of logits, the formulas of the columns, and the record of earlier rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..features import BOUND, Code
from .compiled import any_order, copy_row, exact, kernel

# A token this far below the largest logit has weight 1e-38, which is 0 in single precision. A masked token (-infinity) counts
# as one of these, so that the entropy contains no 0 times infinity.
LEAST = np.float32(-87.0)

_LOG2E = np.float32(1.4426950408889634)
# ln 2 as a sum (Cody and Waite): the first part has nine bits, so that its product with `whole` is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_HALF, _ONE, _BIAS = np.float32(0.5), np.float32(1.0), np.int32(127)
_BLOCK = 64  # entries that are compared or added at a time

_MARGIN, _LARGEST, _ENTROPY = int(Code.MARGIN), int(Code.LARGEST), int(Code.ENTROPY)
_TOKEN_PROBABILITY, _SAMPLED, _PATH = int(Code.TOKEN_PROBABILITY), int(Code.SAMPLED_PROBABILITY), int(Code.PATH)
_NOISY_MARGIN, _NOISY_SCORE, _NOISY_LEAD = int(Code.NOISY_MARGIN), int(Code.NOISY_SCORE), int(Code.NOISY_LEAD)
_TOKEN, _PARENT, _DEPTH, _RANK = int(Code.TOKEN), int(Code.PARENT_TOKEN), int(Code.DEPTH), int(Code.RANK)
_PROBABILITY = int(Code.PROBABILITY)


@exact
def _exp(x: Any) -> Any:
    """Return e^x for -87 <= x <= 0, to 2 units in the last place.

    The polynomial of Cephes. With `math.exp` the compiler does not vectorise: a row of 3,072 logits takes 59 us, not 10.
    """
    whole = np.floor(x * _LOG2E + _HALF)  # -126 .. 0, so that 2^whole is a normal number
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW  # e^x = 2^whole e^r, |r| <= ln 2 / 2
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32((np.int32(whole) + _BIAS) << np.int32(23)).view(np.float32)  # 2^whole, by its bits
    return (p * r * r + r + _ONE) * power  # e^r = 1 + r + r^2 p(r)


@any_order
def _largest(block: Any) -> Any:
    most = block[0]
    for i in range(block.shape[0]):
        most = max(most, block[i])
    return most


@exact
def _largest_of_row(row: Any) -> Any:
    """Return the largest of a row, by position in the block first: 0.3 us for 2,048 entries, not 2."""
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
    """Write the `count` largest of a row to `best` in descending order, and -infinity after them."""
    best[:] = -np.inf
    last = count - 1
    for start in range(0, row.shape[0], _BLOCK):
        block = row[start : start + _BLOCK]
        if not _largest(block) > best[last]:  # nearly all blocks are skipped; only this maximum is vectorised
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
    """Return the sums over a row of e^d and of e^d d, d = (entry - most) scale.

    Each position in a block has its own sums. This fixes the order of additions and still vectorises. An order chosen by the
    compiler differed between kernels, and between the process that compiled a kernel and those that read it from the cache.
    """
    # Single precision within a position, which adds up a 64th of the row; double precision over the positions.
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


@exact
def _probability(top: Any, norm: Any, rank: Any) -> Any:
    """Return the probability of the token of a rank; 0 beyond the vocabulary, where `top` is -infinity."""
    return np.exp(np.float64(top[rank]) - np.float64(top[0]) - norm)


@exact
def _bounded(margin: Any) -> Any:
    return min(max(margin, -BOUND), BOUND)


@kernel(
    "void(int64[:,::1], float32[:,::1], float64[:,::1], float32[:,::1], int64[:,::1], float64[:,::1], float64, "
    "float32[:,::1])"
)
def write_columns(
    codes: Any, top: Any, stats: Any, noisy: Any, ids: Any, numbers: Any, temperature: float, out: Any
) -> None:
    """Write F columns of B tokens to `out` [B, .].

    Args:
        codes: [F, 2], `Code` and column of each.
        top, stats, noisy, numbers: see `features.RowSummary`.
        ids: [B, 6], see `features.DrawnTokens`.
        temperature: of the sampling.
        out: [B, .] is written.
    """
    last = noisy.shape[1] - 1
    for b in range(ids.shape[0]):
        r, rank = ids[b, 0], ids[b, 3]
        for f in range(codes.shape[0]):
            code = codes[f, 0]
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
                value = np.float64(noisy[r, rank])
            elif code == _NOISY_MARGIN:  # to the best token that was not drawn
                ahead = np.float64(noisy[r, rank]) - np.float64(noisy[r, min(ids[b, 4], last)])
                value = _bounded(min(ahead, numbers[b, 3]))
            elif code == _NOISY_LEAD:  # to the best other token, sibling or not
                ahead = np.float64(noisy[r, rank]) - np.float64(noisy[r, 0 if rank > 0 else 1])
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
            out[b, codes[f, 1]] = value


@kernel(
    "void(float32[:,::1], int64, boolean, float32[:,::1], int64, float32[:,::1], float64, int64[:,::1], float64[::1], "
    "float64[::1], float32[:,::1], float64[:,::1], float32[:,::1], float64[:,::1], int64[:,::1], float64, float32[:,::1])"
)
def read_rows(
    logits: Any, ranks: int, spread: bool, scores: Any, most: int, sampled: Any, scale: float, ids: Any,
    parent_path: Any, lead: Any, top: Any, stats: Any, noisy: Any, numbers: Any, codes: Any, temperature: float, out: Any,
) -> None:  # fmt: skip
    """Read each row of logits once, the sampled distribution and the noisy scores once more if they differ, and write
    columns.

    Args:
        logits: [R, V], raw.
        ranks: number of largest logits; 0 = raw logits are not read.
        spread: whether log-sum-exp, entropy and log-probabilities are needed.
        scores, most: [R, V] noisy scores and how many of the largest are needed; 0 = none, or `noisy` holds them.
        sampled, scale: the distribution that is sampled from is softmax(scale sampled), [R, V]; scale 0 = softmax(logits).
        ids, parent_path, lead: see `features.DrawnTokens`; empty = 0 and infinite.
        top, stats, noisy, numbers: are written; see `features.RowSummary`. Empty = scratch; an empty `noisy` is `top`.
        codes, temperature, out: see `write_columns`.
    """
    if not top.shape[0]:
        top, stats = np.empty((logits.shape[0], top.shape[1]), dtype=np.float32), np.empty((logits.shape[0], 2))
    if not numbers.shape[0]:
        numbers = np.empty((ids.shape[0], 4))
    if not noisy.shape[0]:
        noisy = top
    for r in range(logits.shape[0] if ranks > 0 else 0):
        row = logits[r]
        if ranks > 1:
            _rank(row, min(ranks, row.shape[0]), top[r])
        else:
            top[r, 0] = _largest_of_row(row)
        if spread:
            # With d = logit - largest and Z = sum e^d the entropy is ln Z - (sum e^d d) / Z; rounding may take it below 0.
            total, weighted = _spread(row, top[r, 0], np.float32(1.0))
            stats[r, 0] = np.log(total)
            stats[r, 1] = max(np.log(total) - weighted / total, 0.0)
    for r in range(scores.shape[0] if most > 0 else 0):
        _rank(scores[r], min(most, scores.shape[1]), noisy[r])
    read, norm, largest = -1, 0.0, np.float32(0.0)
    for b in range(ids.shape[0]):
        r, token = ids[b, 0], ids[b, 1]
        numbers[b, 3] = lead[b] if lead.shape[0] else np.inf
        if spread:
            numbers[b, 0] = np.float64(logits[r, token] - top[r, 0]) - stats[r, 0]
            numbers[b, 1] = numbers[b, 0]
            numbers[b, 2] = numbers[b, 0] + (parent_path[b] if parent_path.shape[0] else 0.0)
        if scale != 0.0:
            if r != read:  # tokens of one row are adjacent
                read, largest = r, _largest_of_row(sampled[r])
                norm = np.log(_spread(sampled[r], largest, np.float32(scale))[0])
            numbers[b, 1] = np.float64(sampled[r, token] - largest) * scale - norm  # log-weights need not be normalised
    write_columns(codes, top, stats, noisy, ids, numbers, temperature, out)


@exact
def known_depths(active: Any, cut: Any, accepted: Any, verified: Any) -> Any:
    """Return at how many depths a round shows the outcome: the accepted ones and the first rejected one."""
    return min(accepted + 1, verified) if active and not cut else 0


@kernel("void(float64[:,::1], int64[::1], int64[::1], boolean[::1], boolean[::1], float64, float64[:,::1])")
def add_round(record: Any, accepted: Any, verified: Any, active: Any, cut: Any, past: float, after: Any) -> None:
    """Write the record of S streams after a round to `after`; see `history.History`. `past`: `history.PAST_WEIGHT`."""
    for s in range(record.shape[0]):
        copy_row(record[s], after[s])
        if cut[s] or not active[s]:
            continue
        # The weights sum to less than 1 at first. Divided by their sum, the first round counts whole.
        after[s, 4] = past * record[s, 4] + (1.0 - past)
        share = (1.0 - past) / after[s, 4]
        full = 1.0 if accepted[s] == verified[s] else 0.0  # also if nothing was verified
        after[s, 0] += share * (accepted[s] - record[s, 0])
        after[s, 1] += share * (full - record[s, 1])
        after[s, 2] = accepted[s]
        after[s, 3] = verified[s]
