"""Cost-to-go in seconds: what each length of a round costs on a text that does not depend on it.

Under `match` the text of a stream is the same for every policy, so decoding it faster means one thing: fewer seconds from
here to its end. Let V(t) be these seconds from anchor t on under some policy. Then drafting k tokens at t costs

    cost(k) + V(t + min(A_t, k) + 1)

whatever happens later, and two lengths can be compared in hindsight, the start of the next round included (round
starts are not independent; here the term for them is not modelled but read off the text). Neither a rate nor its iteration is
wanted: tokens are given, and only time is left to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ....policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from ....policies.errors import TraceError
from ....policies.profile import Profile
from ..known_lengths import draft_bound
from ..run import replay
from ..seconds import round_seconds
from ..traces.arrays import TraceArrays


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


class ScriptedLengths(StopPolicy):
    """Drafts the length that is laid down for each anchor of a dense trace of chains; the state is, by stream, its row.

    Args:
        arrays: the trace; a stream for each sequence.
        lengths: [N] int64.
        depth: K.
    """

    name, first = "lengths", 0

    def __init__(self, arrays: TraceArrays, lengths: Tensor, depth: int) -> None:
        self.max_depth = depth
        self._lengths, self._offset = lengths.numpy(), arrays.offset.numpy()

    def start(self, streams: int, keys: Array) -> State:
        """Return the first rows of the sequences."""
        assert streams == len(self._offset)
        return self._offset

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length of the anchor."""
        return step.alive & (step.depth < self._lengths[state])[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        """Go on to the anchor after what was committed."""
        # After the last text there is no further row.
        return np.minimum(state + (outcome.accepted + 1) * outcome.active, len(self._lengths) - 1)


class CostToGo:
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
        self.left = arrays.text_tokens[arrays.owner] - arrays.every_anchor
        self.bound = draft_bound(arrays).clamp(max=self.depth)
        context = arrays.prompt_tokens[arrays.owner] + arrays.every_anchor
        one = torch.ones(rows, dtype=torch.int64)
        each = [round_seconds(profile, context, one * k, one * k, one) for k in range(self.depth + 1)]
        self.cost = torch.stack(each, 1)

    @cached_property
    def full_s(self) -> float:
        """Seconds by which a round costs more after one that was accepted whole: its draft has one more token to read."""
        low, high = self.profile.low.draft_s, self.profile.high.draft_s
        return max(0.5 * (low[1] - low[0] + high[1] - high[0]), 0.0)

    def rounds(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return ([...] seconds, [...] next row or -1 after the text) of rounds of these lengths, [N] or [N, M]."""
        wide = lengths if lengths.dim() == 2 else lengths[:, None]
        accepted = torch.minimum(self.arrays.accepted[:, None], wide)
        step = torch.minimum(accepted + 1, self.left[:, None])
        # What full acceptance costs the next round is charged to this one: so the cost-to-go depends on the anchor alone.
        seconds = self.cost.gather(1, wide) + self.full_s * ((accepted == wide) & (wide > 0)).double()
        row = torch.where(step < self.left[:, None], torch.arange(len(step))[:, None] + step, -1)
        return seconds.view(lengths.shape), row.view(lengths.shape)

    def value(self, lengths: Tensor, decided_s: Array | float = 0.0) -> Tensor:
        """Return [N + 1] cost-to-go in seconds from each anchor, the last entry 0, if rounds are of these lengths.

        Args:
            lengths: [N], cut to `bound`.
            decided_s: [N] seconds of the decisions of each round.
        """
        seconds, row = self.rounds(torch.minimum(lengths, self.bound))
        seconds = seconds + torch.as_tensor(decided_s)
        value = torch.zeros(len(seconds) + 1, dtype=torch.float64)
        arrays = self.arrays
        # All texts at once, from their last anchors back: a round leads to a later anchor, whose value is known by then.
        for t in range(int(arrays.rows.max()) - 1, -1, -1):
            at = (arrays.offset + t)[t < arrays.rows]
            value[at] = seconds[at] + value[row[at]]  # the entry after the last, at -1, is 0
        return value

    def outcomes(self, value: Tensor) -> Tensor:
        """Return [N, K + 1] cost-to-go in seconds if this round is of k tokens and the ones after it are worth `value`."""
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
        played = replay(arrays, ScriptedLengths(arrays, lengths, self.depth), self.profile)
        row = arrays.offset[played.log[:, 0]] + played.log[:, 1] - arrays.first_anchor[played.log[:, 0]]
        decided = torch.as_tensor(decided_s, dtype=torch.float64).expand(len(lengths))[row]
        total = played.seconds.index_add(0, played.log[:, 0], decided)
        visits, record = torch.zeros(len(lengths), dtype=torch.bool), torch.zeros(len(lengths), played.history.shape[1])
        visits[row], record[row] = True, played.history
        latest = torch.where(visits, torch.arange(len(visits)), 0).cummax(0).values  # each text begins with a visit
        return Played(total, visits, record[latest])

    def fixed(self) -> tuple[int, Played]:
        """Return the length that is fastest on these texts if all rounds have it, and how it decodes them."""
        played = [self.play(torch.full_like(self.left, k)) for k in range(self.depth + 1)]
        best = min(range(len(played)), key=lambda k: float(played[k].seconds.sum()))
        return best, played[best]
