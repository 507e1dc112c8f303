"""Seconds still to go: what each length of a round costs on a text that does not depend on it.

Under `match` the text of a stream is the same for every policy, so decoding it faster means one thing: fewer seconds from
here to its end. Let V(t) be these seconds from anchor t on under some policy. Then drafting k tokens at t costs

    cost(k) + V(t + min(A_t, k) + 1)

whatever happens later, and two lengths can be compared in hindsight, the start of the next round included (METHODS D4: round
starts are not independent; here the term for them is not modelled but read off the text). Neither a rate nor its iteration is
wanted: tokens are given, and only time is left to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...policies.errors import TraceError
from ...policies.features.history import History
from ...policies.latency.profile import Profile
from .arrays import TraceArrays
from .seconds import prompt_seconds, round_seconds
from .state import Array


@dataclass(frozen=True)
class Played:
    """Texts decoded with given lengths.

    Attributes:
        seconds: [S], prompts included, exactly as replay has them.
        visits: [N] bool, anchors that a round began from.
        history: [N, 4], the HISTORY features there; at an anchor that was passed over, those of the round that did.
    """

    seconds: Tensor
    visits: Tensor
    history: Tensor


class ToGo:
    """The anchors of a dense trace of chains, and what rounds from them cost.

    Args:
        arrays: a trace that has every anchor.
        profile: what rounds cost.

    Attributes:
        depth: K, of trace and profile.
        bound: [N] the longest draft that length limit and EOS allow.
        left: [N] tokens of the text that the rounds from this anchor on have to commit.
        cost: [N, K + 1] seconds of a round of k tokens, backlog 1, without decisions.

    Raises:
        TraceError: the trace is of trees, or misses anchors.
    """

    def __init__(self, arrays: TraceArrays, profile: Profile) -> None:
        if not arrays.tree.is_chain or not arrays.header.has_every_anchor:
            raise TraceError("--traces: expected a dense trace of chains, with every anchor of each text")
        self.arrays, self.profile = arrays, profile
        self.depth = min(arrays.depth, profile.max_depth)
        rows = len(arrays.accepted)
        self.sequence = torch.repeat_interleave(torch.arange(arrays.sequences), arrays.rows)
        self.anchor = torch.arange(rows) - arrays.offset[self.sequence] + arrays.first_anchor[self.sequence]
        self.left = arrays.text_tokens[self.sequence] - self.anchor
        allowed = (arrays.header.max_new_tokens - self.anchor - 1).clamp(max=self.depth)
        ends = arrays.ends[:, : self.depth]
        first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, self.depth + 1)
        self.bound = torch.minimum(allowed, first_end)
        self._capped = (first_end <= allowed) | (allowed < self.depth)
        context = arrays.prompt_tokens[self.sequence] + self.anchor
        one = torch.ones(rows, dtype=torch.int64)
        each = [round_seconds(profile, context, one * k, one * k, one) for k in range(self.depth + 1)]
        self.cost = torch.stack(each, 1)

    @cached_property
    def full_s(self) -> float:
        """Seconds by which a round is dearer behind one that was accepted whole: its draft has one more token to read."""
        low, high = self.profile.low.draft_s, self.profile.high.draft_s
        return max(0.5 * (low[1] - low[0] + high[1] - high[0]), 0.0)

    def rounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return ([...] seconds, [...] next row or -1 behind the text) of rounds of these lengths, [N] or [N, M]."""
        wide = lengths if lengths.dim() == 2 else lengths[:, None]
        accepted = torch.minimum(self.arrays.accepted[:, None], wide)
        step = torch.minimum(accepted + 1, self.left[:, None])
        seconds = self.cost.gather(1, wide) + self.full_s * ((accepted == wide) & (wide > 0)).double()
        row = torch.where(step < self.left[:, None], torch.arange(len(step))[:, None] + step, -1)
        return seconds.view(lengths.shape), row.view(lengths.shape)

    def value(self, lengths: Tensor, decided_s: Array | float = 0.0) -> Tensor:
        """Return [N + 1] seconds to go from each anchor, the last entry 0, if rounds are of these lengths.

        Args:
            lengths: [N], cut to `bound`.
            decided_s: [N] seconds of the decisions of each round.
        """
        seconds, row = self.rounds(torch.minimum(lengths, self.bound))
        seconds = seconds + torch.as_tensor(decided_s)
        value = torch.zeros(len(seconds) + 1, dtype=torch.float64)
        arrays = self.arrays
        for t in range(int(arrays.rows.max()) - 1, -1, -1):
            at = (arrays.offset + t)[t < arrays.rows]
            value[at] = seconds[at] + value[row[at]]  # the entry behind the last, at -1, is 0
        return value

    def level(self, lengths: Tensor, decided_s: Array | float = 0.0) -> Tensor:
        """Return [N + 1] what `value` does if each token still to come takes as long as any other (METHODS D3, no h)."""
        seconds = self.play(lengths, decided_s).seconds - prompt_seconds(self.profile, self.arrays.prompt_tokens)
        each = float(seconds.sum() / (self.arrays.text_tokens - self.arrays.first_anchor).sum().clamp_min(1))
        return torch.cat([each * self.left.double(), torch.zeros(1, dtype=torch.float64)])

    def outcomes(self, value: Tensor) -> Tensor:
        """Return [N, K + 1] seconds to go if this round is of k tokens and the ones behind it are worth `value`."""
        every = torch.arange(self.depth + 1).expand(len(self.left), -1)
        seconds, row = self.rounds(every)
        return seconds + value[row]

    def play(self, lengths: Tensor, decided_s: Array | float = 0.0) -> Played:
        """Decode the texts in rounds of these lengths.

        Args:
            lengths: [N], of the round from each anchor; cut to `bound`.
            decided_s: [N] seconds of its decisions.
        """
        arrays = self.arrays
        lengths = torch.minimum(lengths, self.bound)
        decided = torch.as_tensor(decided_s, dtype=torch.float64).expand(len(lengths))
        total = prompt_seconds(self.profile, arrays.prompt_tokens)
        at = arrays.offset.clone()
        backlog = arrays.prompt_tokens + arrays.first_anchor
        active = arrays.text_tokens > arrays.first_anchor
        past, visits = History.start(arrays.sequences), torch.zeros(len(lengths), dtype=torch.bool)
        record = torch.zeros(len(lengths), past.record.shape[1])
        while bool(active.any()):
            row = torch.where(active, at, arrays.offset)
            visits[row[active]], record[row[active]] = True, torch.from_numpy(past.values())[active]
            k = lengths[row]
            context = arrays.prompt_tokens + self.anchor[row]
            seconds = round_seconds(self.profile, context, k, k, backlog) + decided[row]
            total = total + seconds * active
            accepted = torch.minimum(arrays.accepted[row], k)
            committed = torch.minimum(accepted + 1, self.left[row])
            read = torch.minimum(accepted, k - 1)
            backlog = committed + torch.where(k > 0, -read, backlog)
            goes_on = active & (committed < self.left[row])
            counts = goes_on & ~(self._capped[row] & (k == self.bound[row]))
            past = past.after(accepted.numpy(), k.numpy(), counts.numpy())
            active = goes_on
            at = torch.where(active, row + committed, at)
        latest = torch.where(visits, torch.arange(len(visits)), 0).cummax(0).values  # each text begins with a visit
        return Played(total, visits, record[latest])

    def fixed(self) -> tuple[int, Played]:
        """Return the length that is fastest on these texts if all rounds have it, and how it decodes them."""
        played = [self.play(torch.full_like(self.left, k)) for k in range(self.depth + 1)]
        best = min(range(len(played)), key=lambda k: float(played[k].seconds.sum()))
        return best, played[best]
