"""Learned policies that decide on the device: a chain is drafted without a wait, then the host waits once for its length.

After each draft step the device computes features, head and rule. The host launches further steps meanwhile and ends when it
sees, without a wait, that no stream drafts on. Steps launched in vain are skipped (`models.device.Recorder`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..policies.contract import StopPolicy
from ..policies.features import DRAFT_HIDDEN, History, Layout, feature
from ..policies.heads.base import Head
from ..policies.heads.layers import HardHead, LinearHead, MLPHead, SoftHead
from ..policies.heads.residual import ResNetHead, SpecDecHead
from ..policies.heads.tables import TokenHead
from ..policies.kernels.heads import MAX_PROBABILITY, MIN_PROBABILITY
from ..policies.learned import LearnedPolicy
from ..policies.rules import Derived, Threshold
from .feature_reader import FeatureReader
from .models.device import Copy, Recorded, Recorder, to_host, upload
from .round_state import DraftScores, RoundState
from .summaries import columns_on_device, recorder


def device_policy(
    policy: StopPolicy, reader: FeatureReader, deepest: int, ends: Collection[int]
) -> DevicePolicy | None:
    """Return a policy that decides as this one does, but on the device; None if a part of it is not supported."""
    if type(policy) is not LearnedPolicy or type(policy.rule) not in (Derived, Threshold):
        return None
    has_custom = any(feature(name).function for name in policy.features)
    if has_custom or type(policy.head) not in SCORES or reader.reducers.keys() != policy.head.reductions.keys():
        return None
    return DevicePolicy(policy, reader, deepest, ends)


class DevicePolicy:
    """Decides about chains of S streams on the device that drafts them: `begin`, `step` at each depth, `settle`.

    The state is [S, 4] float64: whether the stream drafts on, its candidates, the policy's survival, and the log-probability
    of the path.

    Args:
        policy: see `device_policy`.
        reader: reads its features.
        deepest: largest length.
        ends: token ids that end a text.
    """

    def __init__(self, policy: LearnedPolicy, reader: FeatureReader, deepest: int, ends: Collection[int]) -> None:
        self._policy, self._reader, self._deepest, self._ends = policy, reader, deepest, sorted(ends)
        self._first, self._follows_path = max(policy.first, 1), "path_logprob" in policy.features
        self._codes, self._places = Layout(policy.features).node_columns.codes.T
        self._steps: dict[int, tuple[Recorded[tuple[Tensor, Tensor]], Tensor]] = {}
        self._records: Recorder | None = None
        self._fixed: list[Tensor] = []  # the state, then what does not change within a round; recordings read them

    def begin(self, round: RoundState, history: History) -> None:
        """Begin a round."""
        self._round, self._history, self._flags, self._has_drafted = round, history, list[Copy](), False

    def has_stopped(self) -> bool:
        """Whether the host knows, without a wait, that no stream drafts on."""
        is_recorded = len(self._steps) == self._deepest and all(recorded.play for recorded, _ in self._steps.values())
        if self._records and self._records.works and not is_recorded:  # so that no step is recorded much later
            return False
        return any(flag.has_arrived() and not flag.wait() for flag in self._flags)

    def step(self, depth: int, scores: DraftScores, tokens: Tensor) -> None:
        """Decide about the candidates [R] of a depth, which are in `RoundState.device_tokens` too."""
        if not self._has_drafted:
            self._upload(tokens.device)
        chain, streams, size = self._round.device_tokens, [s for s, _ in scores.rows], len(self._round.active)
        assert chain is not None
        parts, is_decided = [torch.ones_like(tokens[:, None])], self._first <= depth < self._deepest
        if is_decided or (self._follows_path and depth < self._deepest):
            launched, values = self._reader.launch(scores, tokens)
            lead = values["lead"] if "lead" in values else torch.full_like(scores.raw[:, 0], torch.inf)
            parts += [*launched.parts(launched.values), lead[:, None]]
            parts += [values["states"]] if DRAFT_HIDDEN in self._policy.hidden else []
        inputs = torch.cat([part.double() for part in parts], 1)
        if len(streams) < size:
            inputs = inputs.new_zeros(size, inputs.shape[1]).index_copy_(0, upload(streams, inputs.device), inputs)
        inputs = torch.cat([chain[:, depth - 1 : depth + 1].double(), inputs], 1)
        decide = partial(self._decide, depth, is_decided, [part.shape[1] for part in parts])
        self._records = records = recorder(inputs.device)
        if records.works:
            if depth not in self._steps:
                self._steps[depth] = Recorded(), torch.empty_like(inputs)
            recorded, buffer = self._steps[depth]
            buffer.copy_(inputs)
            state, needed = recorded.run_or_replay(records, lambda: decide(buffer))
        else:
            state, needed = decide(inputs)
        self._fixed[0].copy_(state)
        if depth < self._deepest:
            self._round.needed = needed
            self._flags.append(Copy(needed))

    def settle(self) -> None:
        """Set the candidates of the round on the host, which waits once."""
        if self._has_drafted and self._round.device_tokens is not None:
            state, tokens = to_host(self._fixed[0], self._round.device_tokens)
            self._round.settle(state[:, 1].long().tolist(), tokens.numpy(), self._first)

    def _upload(self, device: torch.device) -> None:
        """Upload what does not change within a round."""
        batch = np.where(self._round.active, 0, -1)
        levels = (self._policy.rule.threshold_at(depth, batch) for depth in range(self._deepest))
        arrays = [np.tile([1.0, 0.0, 1.0, 0.0], (len(batch), 1)), np.stack([np.resize(x, len(batch)) for x in levels])]
        tensors = [upload(array, device) for array in (*arrays, *self._reader.before_drafting(self._history))]
        self._has_drafted = True
        if self._fixed:
            for fixed, new in zip(self._fixed, tensors, strict=True):
                fixed.copy_(new)
            return
        self._fixed = tensors
        maps = self._policy.accept.pieces, self._policy.next.pieces, *self._policy.tables
        self._accept, self._next, *self._tables = (upload(pieces, device) for pieces in maps)
        self._at, self._end_ids = upload(self._places, device), upload(self._ends, device)
        self._score = score_function(self._policy.head, device)

    def _decide(self, depth: int, is_decided: bool, widths: list[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new state and whether a stream drafts on.

        `inputs` are [S, .] float64: the token before the candidate, the candidate, then parts of these widths: whether there
        is a candidate, and what the reader launched, if anything.
        """
        policy, rule, (before, levels, base, *target) = self._policy, self._policy.rule, self._fixed
        alive, count, survival, path = before.unbind(1)
        (parent, token), (drawn, *parts) = inputs[:, :2].unbind(1), inputs[:, 2:].split(widths, 1)
        goes = (alive * drawn[:, 0]) > 0
        count = torch.where(goes, float(depth), count)
        if parts:
            path = path + parts[3][:, 0]
        if is_decided:
            statistics, lead, states = parts[:4], parts[4][:, 0], [*(part.float() for part in parts[5:]), *target]
            if len(self._codes):
                columns = columns_on_device(self._codes.tolist(), statistics, token, parent, depth, path, lead)
                base = base.index_copy(1, self._at, columns)
            scores = self._score(features=base, states=states, depth=depth)
            chance = torch.ones_like(count) if depth <= policy.head.lag else calibrated(scores[:, 0], self._accept)
            survival = chance if depth == self._first else survival * chance
            if self._tables[depth].shape[1]:
                survival = calibrated(survival, self._tables[depth])
            following = calibrated(scores[:, 1], self._next)
            value = (survival, chance, following, survival * following)[rule.compared]
            goes = goes & (value > levels[depth] if rule.strict else value >= levels[depth])
        if self._ends:
            goes = goes & (token[:, None] != self._end_ids).all(1)
        return torch.stack([goes.double(), count, survival, path], 1), goes.any()


def calibrated(scores: Tensor, pieces: Tensor) -> Tensor:
    """Return the values of a map at scores [n]; see `Calibrator.pieces`."""
    if len(pieces) == 1:
        return 1.0 / (1.0 + (-pieces[0, 0] * scores).exp())
    at = torch.searchsorted(pieces[0], scores.contiguous()).clamp_max(pieces.shape[1] - 1)  # NaN comes after infinity
    return pieces[2][at] + pieces[3][at] * (scores - pieces[1][at])


def _columns(features: Tensor, bounds: Tensor, odds: Tensor) -> Tensor:
    """Return clipped features [S, F] and the log-odds of the probabilities among them, float64."""
    x = torch.minimum(torch.maximum(features, bounds[0]), bounds[1]).double()
    p = x.index_select(1, odds).clamp(MIN_PROBABILITY, MAX_PROBABILITY)
    return torch.cat([x, (p / (1.0 - p)).log()], 1)


def _score_layers(
    bounds: Tensor, odds: Tensor, sizes: Any, weights: Tensor, relu: bool, *, features: Tensor, **_: Any
) -> Tensor:
    x, at = _columns(features, bounds, odds), 0
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes.tolist())):
        if layer:
            x = x.relu() if relu else functional.silu(x)
        end = at + outputs + inputs * outputs
        x, at = x @ weights[at + outputs : end].view(inputs, outputs) + weights[at : at + outputs], end
    return x


def _score_tokens(
    bounds: Tensor, odds: Tensor, weights: Tensor, bias: Tensor, ids: Tensor, tables: Tensor, columns: Any, edges: Tensor,
    strides: Tensor, hashed: Tensor, *, features: Tensor, depth: int, **_: Any,
) -> Tensor:  # fmt: skip
    x = _columns(features, bounds, odds)
    tokens = x.index_select(1, ids)  # [S, I]
    is_known = (tokens >= 0) & (tokens < tables.shape[1])
    looked_up = tables[torch.arange(len(ids), device=x.device), torch.where(is_known, tokens, 0.0).long()]
    out = x @ weights + bias[min(depth, len(bias) - 1)] + (looked_up.double() * is_known[..., None]).sum(1)
    if len(strides):
        crossed = [x[:, column] if column >= 0 else torch.full_like(x[:, 0], depth) for column, _ in columns.tolist()]
        cells = [
            value.long() if which < 0 else (edges[which] < value[:, None]).sum(1)
            for value, which in zip(crossed, columns[:, 1].tolist(), strict=True)
        ]
        place = (torch.stack(cells, 1)[:, None] * strides).sum(-1) % hashed.shape[1]  # [S, C]
        out = out + hashed[torch.arange(len(strides), device=x.device), place].double().sum(1)
    return out


def _score_residual(
    bounds: Tensor, odds: Tensor, weight: Tensor, bias: Tensor, blocks: Tensor, shifts: Tensor, leave: Tensor,
    leave_bias: Tensor, *, features: Tensor, states: list[Tensor], **_: Any,
) -> Tensor:  # fmt: skip
    x = functional.linear(_columns(features, bounds, odds).float(), weight, bias)
    x = x + sum(states)
    for block, shift in zip(blocks.unbind(), shifts.unbind(), strict=True):
        x = x + functional.silu(functional.linear(x, block, shift))
    return functional.linear(x, leave, leave_bias).double()


def _score_state(*, states: list[Tensor], **_: Any) -> Tensor:
    return states[0].double().expand(-1, 2)


def score_function(head: Head, device: torch.device) -> Callable[..., Tensor]:
    """Return `Head.scores` [S, 2] float64 at depths above 0, on a device.

    Its arguments are features [S, F], states (the outputs [S, W] of `Head.reductions`) and depth.
    """
    score, on_host = SCORES[type(head)]
    return partial(score, *(
        upload(value, device) if isinstance(value, np.ndarray) and at != on_host else value
        for at, value in enumerate(head.arguments[0])
    ))  # fmt: skip


SCORES: Mapping[type[Head], tuple[Callable[..., Tensor], int]] = {
    **dict.fromkeys((LinearHead, MLPHead, HardHead), (_score_layers, 2)), TokenHead: (_score_tokens, 6),
    ResNetHead: (_score_residual, -1), **dict.fromkeys((SoftHead, SpecDecHead), (_score_state, -1)),
}  # fmt: skip
"""By type of head, a function of `Head.arguments` and of those of `score_function`; which argument stays on the host."""
