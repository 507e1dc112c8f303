"""Features: one pass over rows of logits, and the formulas of the columns; counts and records of rounds; random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..counter_rng import GOLDEN, mix_in_place, signed
from ..features import BOUND, TOP, Code
from .compiled import any_order, copy_row, kernel, kernel_part

_GOLDEN = signed(GOLDEN)
_mix = kernel_part(mix_in_place)


@kernel("void(int64[::1], int64[::1], float64[:,::1])")
def write_uniform(keys: Any, number: Any, out: Any) -> None:
    """Write [S, count] uniforms; see `keyed_uniform`."""
    for s in range(out.shape[0]):
        # Each draw has its own SplitMix64 sequence. `decode.verify.noise` computes the same bits on a device.
        row = _mix(_mix(number[s] * _GOLDEN + 1) ^ keys[s])
        for i in range(out.shape[1]):
            bits = (_mix(row + (i + 1) * _GOLDEN) >> 11) & ((1 << 53) - 1)  # the precision of float64
            out[s, i] = max(bits * 2.0**-53, 2.0**-54)  # 0 has no logarithm


@kernel(
    "void(int64[::1], int64[::1], int64[::1], boolean[:,:,::1], boolean[:,::1], boolean[:,::1], int64[:,::1], "
    "int64[:,:,::1])"
)
def count_round(
    parent: Any, depth: Any, drafter: Any, marks: Any, drafting: Any, sent: Any, counts: Any, steps: Any
) -> None:
    """Write what S streams send to the target, and what they did so far.

    Args:
        parent, depth, drafter: [N] by row of the tree; the parent of row 0 is -1. Rows are in order of depth.
        marks: [5, S, N] rows that were drawn, dropped, fed, decided on (the fifth is not read).
        drafting: [S, D] drafters that were fed row 0.
        sent: [S, N] row 0, and what was drawn and not dropped on paths of such rows.
        counts: [3, S] tokens drawn, tokens sent, depths at which the policy was called.
        steps: [S, D, K] rows fed to each drafter at each depth.
    """
    drawn, dropped, fed, decided = marks[0], marks[1], marks[2], marks[3]
    for s in range(sent.shape[0]):
        drafted, verified, decisions, last = 0, 0, 0, -1
        for d in range(steps.shape[1]):
            steps[s, d, 0] = drafting[s, d] if steps.shape[1] > 1 else fed[s, 0]
            steps[s, d, 1:] = 0
        for row in range(sent.shape[1]):
            parent_row = parent[row]
            goes = parent_row < 0
            if parent_row >= 0:
                goes = drawn[s, row] and not dropped[s, row] and sent[s, parent_row]  # parents come first
                drafted += drawn[s, row]  # what was dropped has cost its draft step all the same
                verified += goes
            sent[s, row] = goes
            if row and fed[s, row]:
                steps[s, drafter[row], depth[row]] += 1
            if decided[s, row] and depth[row] != last:  # rows of a depth follow one another
                decisions += 1
                last = depth[row]
        counts[0, s], counts[1, s], counts[2, s] = drafted, verified, decisions


@kernel(
    "void(float32[:,::1], int64[::1], float32[:,::1], int64[::1], float32[:,:,:], int64[::1], int64[::1], int64, "
    "boolean[:,::1], float32[:,:,::1])"
)
def look_up(
    anchors: Any, anchor_at: Any, history: Any, history_at: Any, nodes: Any, node_at: Any, row: Any, first: int,
    alive: Any, out: Any,
) -> None:  # fmt: skip
    """Write the features of the branches that are alive.

    Args:
        anchors: [R, .] ANCHOR columns of the rows of a trace; `anchor_at` the columns of `out` that they fill.
        history, history_at: [S, .] the same of the streams' earlier rounds.
        nodes, node_at: [R, N, .] of the nodes of a row.
        row: [S] of the streams' anchors.
        first: the node of the first branch; below 0 before any node.
        alive: [S, B].
        out: [S, B, F], zeros.
    """
    # `nodes` need not be contiguous: replay passes a view of some of the trace's columns, where a copy would cost their size.
    for s in range(alive.shape[0]):
        for b in range(alive.shape[1]):
            if not alive[s, b]:
                continue
            for f in range(anchor_at.shape[0]):
                out[s, b, anchor_at[f]] = anchors[row[s], f]
            for f in range(history_at.shape[0]):
                out[s, b, history_at[f]] = history[s, f]
            if first >= 0:
                for f in range(node_at.shape[0]):
                    out[s, b, node_at[f]] = nodes[row[s], first + b, f]


@kernel("void(float64[:,::1], int64[::1], int64[::1], boolean[::1], boolean[::1], float64, float64[:,::1])")
def add_round(record: Any, accepted: Any, verified: Any, active: Any, cut: Any, past: float, after: Any) -> None:
    """Write the record of S streams after a round; see `features.History`."""
    for s in range(record.shape[0]):
        copy_row(record[s], after[s])
        if cut[s] or not active[s]:
            continue
        after[s, 4] = past * record[s, 4] + (1.0 - past)
        share = (1.0 - past) / after[s, 4]  # so that the first round counts whole
        full = 1.0 if accepted[s] == verified[s] else 0.0  # also if nothing was verified
        after[s, 0] += share * (accepted[s] - record[s, 0])
        after[s, 1] += share * (full - record[s, 1])
        after[s, 2] = accepted[s]
        after[s, 3] = verified[s]


# The weight e^-87 = 1e-38 is 0 in single precision. Masked tokens (-infinity) count as this far below the largest logit, so
# that the entropy contains no 0 times infinity.
MIN_LOG_WEIGHT = np.float32(-87.0)

_LOG2E = np.float32(1.4426950408889634)
# ln 2 as a sum (Cody and Waite): the first part has nine bits, so that its product with `whole` is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_HALF, _ONE, _BIAS = np.float32(0.5), np.float32(1.0), np.int32(127)
_BLOCK = 64  # entries that are compared or added at a time


@kernel_part
def _exp(x: Any) -> Any:
    """Return e^x for -87 <= x <= 0, to 2 units in the last place, by the polynomial of Cephes."""
    # `math.exp` is not vectorised: a row of 3,072 logits would take 59 us instead of 10.
    whole = np.floor(x * _LOG2E + _HALF)  # -126 .. 0, so that 2^whole is a normal number
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW  # e^x = 2^whole e^r, |r| <= ln 2 / 2
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32((np.int32(whole) + _BIAS) << np.int32(23)).view(np.float32)  # 2^whole, by its bits
    return (p * r * r + r + _ONE) * power  # e^r = 1 + r + r^2 p(r)


@any_order
def _max(block: Any) -> Any:
    result = block[0]
    for i in range(block.shape[0]):
        result = max(result, block[i])
    return result


@kernel_part
def _max_of_row(row: Any) -> Any:
    """Return the largest entry, first by position in the block: 0.3 us for 2,048 entries instead of 2."""
    maxima, whole = np.full(_BLOCK, row[0], np.float32), row.shape[0] - row.shape[0] % _BLOCK
    for start in range(0, whole, _BLOCK):
        block = row[start : start + _BLOCK]
        for k in range(_BLOCK):
            maxima[k] = block[k] if block[k] > maxima[k] else maxima[k]
    for k in range(row.shape[0] - whole):
        maxima[k] = max(maxima[k], row[whole + k])
    return _max(maxima)


@any_order
def _rank(row: Any, count: Any, best: Any) -> None:
    """Write the `count` largest entries to `best` in descending order, then -infinity."""
    best[:] = -np.inf
    last = count - 1
    for start in range(0, row.shape[0], _BLOCK):
        block = row[start : start + _BLOCK]
        if not _max(block) > best[last]:  # nearly all blocks are skipped; only this maximum is vectorised
            continue
        for i in range(block.shape[0]):
            value = block[i]
            if value > best[last]:
                at = last
                while at > 0 and value > best[at - 1]:
                    best[at] = best[at - 1]
                    at -= 1
                best[at] = value


@kernel_part
def _spread(row: Any, largest: Any, scale: Any) -> Any:
    """Return the sums over a row of e^d and of e^d d, d = (entry - largest) scale."""
    # Each position in a block has its own sums: this fixes the order of additions and still vectorises. An order chosen by
    # the compiler differed between kernels, and between compiled and cached ones.
    sums, weighted = np.zeros(_BLOCK, np.float32), np.zeros(_BLOCK, np.float32)
    whole = row.shape[0] - row.shape[0] % _BLOCK
    for start in range(0, whole, _BLOCK):
        block = row[start : start + _BLOCK]
        for k in range(_BLOCK):
            below = max((block[k] - largest) * scale, MIN_LOG_WEIGHT)
            power = _exp(below)
            sums[k] += power
            weighted[k] += power * below
    for k in range(row.shape[0] - whole):
        below = max((row[whole + k] - largest) * scale, MIN_LOG_WEIGHT)
        power = _exp(below)
        sums[k] += power
        weighted[k] += power * below
    total, total_weighted = 0.0, 0.0
    for k in range(_BLOCK):
        total += sums[k]
        total_weighted += weighted[k]
    return total, total_weighted


@kernel_part
def _probability(top: Any, norm: Any, rank: Any) -> Any:
    """Return the probability of the token of a rank; 0 beyond the vocabulary, where `top` is -infinity."""
    return np.exp(np.float64(top[rank]) - np.float64(top[0]) - norm)


@kernel(
    "void(int64[:,::1], float32[:,::1], float64[:,::1], float32[:,::1], int64[:,::1], float64[:,::1], float64, "
    "float32[:,::1])"
)
def write_columns(
    codes: Any, top: Any, stats: Any, noisy: Any, ids: Any, numbers: Any, temperature: float, out: Any
) -> None:
    """Write F features of B tokens to `out` [B, .].

    `codes` [F, 2] are the `Code` and the column of each feature; see also `features.RowSummary` and `features.DrawnTokens`.
    """
    for b in range(ids.shape[0]):
        r, rank = ids[b, 0], ids[b, 3]
        for f in range(codes.shape[0]):
            code = codes[f, 0]
            if code >= Code.PROBABILITY:
                value = _probability(top[r], stats[r, 0], code - Code.PROBABILITY)
            elif code == Code.MARGIN:
                value = _probability(top[r], stats[r, 0], 0) - _probability(top[r], stats[r, 0], 1)
            elif code == Code.LARGEST:
                value = np.float64(top[r, 0])
            elif code == Code.ENTROPY:
                value = stats[r, 1]
            elif code == Code.TOKEN_PROBABILITY:
                value = np.exp(numbers[b, 0])
            elif code == Code.SAMPLED_PROBABILITY:
                value = np.exp(numbers[b, 1])
            elif code == Code.PATH:
                value = numbers[b, 2]
            elif code == Code.NOISY_SCORE:
                value = np.float64(noisy[r, rank])
            elif code == Code.NOISY_MARGIN or code == Code.NOISY_LEAD:
                # Of the best token that was not drawn, or the best other one.
                other = min(ids[b, 4], noisy.shape[1] - 1) if code == Code.NOISY_MARGIN else 0 if rank > 0 else 1
                margin = np.float64(noisy[r, rank]) - np.float64(noisy[r, other])
                value = min(max(min(margin, numbers[b, 3]), -BOUND), BOUND)
            elif code == Code.TOKEN:
                value = np.float64(ids[b, 1])
            elif code == Code.PARENT_TOKEN:
                value = np.float64(ids[b, 2])
            elif code == Code.DEPTH:
                value = np.float64(ids[b, 5])
            elif code == Code.RANK:
                value = np.float64(rank)
            else:
                value = temperature
            out[b, codes[f, 1]] = value


_ROWS = (
    "float32[:,::1], int64, boolean, float32[:,::1], int64, float32[:,::1], float32[:,::1], float64, int64[:,::1], "
    "float64[::1], float64[::1]"
)


@kernel(f"Tuple((float32[:,::1], float64[:,::1], float32[:,::1], float64[:,::1]))({_ROWS})")
def summarise_rows(
    logits: Any, ranks: int, spread: bool, scores: Any, noisy_count: int, best: Any, sampled: Any, scale: float, ids: Any,
    parent_path: Any, lead: Any,
) -> Any:  # fmt: skip
    """Return the arrays of a `features.RowSummary`.

    Args:
        logits: [R, V], raw.
        ranks: number of largest logits; 0 = raw logits are not read.
        spread: whether log-sum-exp, entropy and log-probabilities are needed.
        scores, noisy_count: [R, V] noisy scores and the number of largest ones; 0 = `best` [R, m], or `top` if it is empty.
        sampled, scale: the distribution that is sampled from is softmax(scale sampled), [R, V]; scale 0 = softmax(logits).
        ids, parent_path, lead: see `features.DrawnTokens`; empty = 0 and infinite.
    """
    rows = logits.shape[0]
    top, stats, numbers = np.empty((rows, TOP), np.float32), np.empty((rows, 2)), np.empty((ids.shape[0], 4))
    noisy = best if best.shape[0] else top
    for r in range(rows if ranks > 0 else 0):
        row = logits[r]
        if ranks > 1:
            _rank(row, min(ranks, row.shape[0]), top[r])
        else:
            top[r, 0] = _max_of_row(row)
        if spread:
            # With Z = sum e^d the entropy is ln Z - (sum e^d d) / Z; rounding may take it below 0.
            total, weighted = _spread(row, top[r, 0], np.float32(1.0))
            stats[r, 0] = np.log(total)
            stats[r, 1] = max(np.log(total) - weighted / total, 0.0)
    if noisy_count > 0:
        noisy = np.empty((rows, noisy_count), np.float32)
        for r in range(rows):
            _rank(scores[r], min(noisy_count, scores.shape[1]), noisy[r])
    last_row, norm, largest = -1, 0.0, np.float32(0.0)
    for b in range(ids.shape[0]):
        r, token = ids[b, 0], ids[b, 1]
        numbers[b, 3] = lead[b] if lead.shape[0] else np.inf
        if spread:
            numbers[b, 0] = np.float64(logits[r, token] - top[r, 0]) - stats[r, 0]
            numbers[b, 1] = numbers[b, 0]
            numbers[b, 2] = numbers[b, 0] + (parent_path[b] if parent_path.shape[0] else 0.0)
        if scale != 0.0:
            if r != last_row:  # tokens of one row are adjacent
                last_row, largest = r, _max_of_row(sampled[r])
                norm = np.log(_spread(sampled[r], largest, np.float32(scale))[0])
            numbers[b, 1] = np.float64(sampled[r, token] - largest) * scale - norm  # log-weights need not be normalised
    return top, stats, noisy, numbers


@kernel(f"float64[::1]({_ROWS}, int64[:,::1], float64, float32[:,::1])")
def read_columns(
    logits: Any, ranks: int, spread: bool, scores: Any, noisy_count: int, best: Any, sampled: Any, scale: float, ids: Any,
    parent_path: Any, lead: Any, codes: Any, temperature: float, out: Any,
) -> Any:  # fmt: skip
    """Summarise rows and write columns in one call, which saves 1 us; return the log-probabilities [B] of paths."""
    top, stats, noisy, numbers = summarise_rows(
        logits, ranks, spread, scores, noisy_count, best, sampled, scale, ids, parent_path, lead
    )
    write_columns(codes, top, stats, noisy, ids, numbers, temperature, out)
    return numbers[:, 2].copy()
