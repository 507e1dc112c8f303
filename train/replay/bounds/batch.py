"""What no policy of a batch can beat: a bound that knows every stream's accepted lengths.

Streams of a batch share the cost of their rounds, so that the best plan of all of them is no shortest path of each. But for
any price a token, l, and any round of s streams that sends n tokens,

    verify(s, n) >= s a + l n,   a = the least of (verify(s', n') - l n') / s' over all s' <= S and n'

and a draft step of m streams costs at least m times the least share of any such step. Whoever knows all accepted lengths
therefore needs at least what every text needs alone at these prices, which is the shortest path of `oracle`. Every price
gives a bound; the one returned is the highest of some. No policy is below it, and none need reach it: it shares each step
as well as steps can be shared.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ....policies.contract import Array
from ....policies.costs import MIN_CALL_S, CostTable
from ....policies.profile import Profile
from ..traces.arrays import TraceArrays
from .oracle import oracle_seconds


def batch_bound(arrays: TraceArrays, profile: Profile, batch: int) -> Tensor:
    """Return [S] float64, seconds of each text: their sum is the least in which `batch` streams could decode all of them.

    Args:
        arrays: a dense trace of chains.
        profile: with batches, unless `batch` is 1.
        batch: streams side by side.
    """
    if batch == 1 or profile.batch is None:
        return oracle_seconds(arrays, profile)
    last = float((arrays.prompt_tokens + arrays.text_tokens).max())
    # Tables at both ends of all contexts met: the least of costs that are linear in the context is concave, so that the line
    # between its ends is nowhere above it.
    contexts = min(profile.batch.low.context, 1.0), max(profile.batch.high.context, last)
    depth = min(arrays.depth, profile.max_depth)
    prices = _prices(profile, batch, 0.5 * sum(contexts), depth)
    shares = [_shares(profile, batch, price, contexts, depth) for price in prices]
    bounds = [oracle_seconds(arrays, one) for one in shares if one is not None]
    return max(bounds, key=lambda seconds: float(seconds.sum()))


def _prices(profile: Profile, batch: int, context: float, depth: int) -> list[float]:
    """Return prices a token to try: nothing, and the slopes from plain decoding to every larger verification."""
    tokens = _sent(profile, batch, depth)
    tokens = tokens[tokens > batch]
    plain = profile.verify_s(batch, batch, context)
    rises = (profile.verify_s(batch, tokens, context) - plain) / (tokens - batch)
    return sorted({0.0, *np.maximum(rises, 0.0).tolist()})


def _sent(profile: Profile, batch: int, depth: int) -> Array:
    """Return [n], the tokens at which a verification can be cheapest at any price: where its costs have a corner."""
    assert profile.batch is not None
    corners = {n for points in profile.batch.low.verify_s.values() for n, _ in points}
    most = batch * (depth + 1)
    return np.array(sorted({n for n in corners if n <= most} | set(range(1, batch + 1)) | {most}))


def _shares(profile: Profile, batch: int, price: float, contexts: tuple[float, float], depth: int) -> Profile | None:
    """Return the minimum costs of a round for each stream at a price a token; None if a verification would cost nothing."""
    streams = np.arange(1, batch + 1)
    tokens = _sent(profile, batch, depth)
    pairs = tokens[None] >= streams[:, None]  # each stream sends its anchor at least

    def table(context: float) -> CostTable | None:
        verify = profile.verify_s(streams[:, None], tokens[None], context) - price * tokens[None]
        share = float(np.where(pairs, verify / streams[:, None], np.inf).min())
        if share + price <= 0.0:
            return None
        first, later = (
            float((of(streams, context) / streams).min()) for of in (profile.first_draft_s, profile.draft_s)
        )
        sent = tuple(max(share + price * (n + 1), MIN_CALL_S) for n in range(depth + 1))
        return CostTable(context, (first, first), 0.0, sent, later)  # a backlog is read for nothing

    low, high = (table(context) for context in contexts)
    return Profile(low, high, 0.0, 0.0, profile.prefill_s) if low and high else None
