"""Policies that use each part of the contract, to compare the live loop with plain decoding and replay."""

from __future__ import annotations

import numpy as np
from specstop.policies.contract import Array, DraftStep, DraftTree, RoundOutcome, State, StopPolicy
from specstop.policies.counter_rng import mix
from specstop.policies.fixed import Confidence, FixedLength
from trees import make_tree_policy

DEPTH = 5


class FromAnchor(StopPolicy):
    """Is called at depth 0, where it sometimes stops."""

    name, features, first, max_depth = "from-anchor", ("top2", "anchor_top1", "drawn_prob"), 0, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        if step.depth == 0:
            assert not step.features[..., [0, 2]].any(), "depth 0 knows ANCHOR and HISTORY columns only"
        keep = step.features[..., 1] < 0.6 if step.depth == 0 else step.features[..., 2] > 0.3
        return step.alive & keep, state


class Trimming(StopPolicy):
    """Drops the token just drawn where it stops."""

    name, features, trims, max_depth = "trimming", ("path_logprob", "noisy_margin"), True, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > -1.6) & (step.features[..., 1] > 0.3), state


class TrimmingFromAnchor(FromAnchor):
    """Trims, and may stop before the first token, when there is nothing to trim."""

    name, trims = "trimming-from-anchor", True


class Selecting(StopPolicy):
    """Drafts to the limit, then verifies one token less in each round, down to none."""

    name, max_depth = "selecting", DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.zeros(streams, dtype=np.int64)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.depth <= (DEPTH - state % (DEPTH + 1))[:, None]

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        return state + outcome.active


class TrimmingSelecting(Trimming):
    """Trims at the stop, then verifies depth 1 only."""

    name = "trimming-selecting"

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.drawn & (tree.depth <= 1)


class SelectingByToken(StopPolicy):
    """Verifies up to the first odd token."""

    name, max_depth = "selecting-by-token", DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        return np.logical_and.accumulate(tree.tokens % 2 == 0, 1)


class ReadsHistory(StopPolicy):
    """Drafts while earlier rounds were accepted."""

    name, max_depth = "reads-history", DEPTH
    features = ("mean_accepted", "top1", "last_verified", "mean_full", "last_accepted")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        mean, top1, verified, full, accepted = np.moveaxis(step.features, -1, 0)
        return step.alive & (mean + top1 + full + 0.1 * (verified - accepted) > 0.6 * step.depth), state


class Randomised(StopPolicy):
    """Stops at random, keyed by the stream and the number of its decisions."""

    name, first, max_depth = "randomised", 0, DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return keys, np.zeros_like(keys)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        key, count = state
        keep = mix(key + 977 * count) & 3 != 0
        return step.alive & keep[:, None], (key, count + step.alive[:, 0])


class Adaptive(StopPolicy):
    """Adapts its length to accepted tokens and to seconds."""

    name, max_depth = "adaptive", DEPTH

    def start(self, streams: int, keys: Array) -> State:
        return np.ones(streams, dtype=np.int64), np.zeros(streams)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        length, seconds = state
        bonus = np.floor(seconds * 1e5).astype(np.int64) % 2
        return step.alive & (step.depth < length + bonus)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        length, seconds = state
        moved = np.clip(length + np.where(outcome.accepted == outcome.verified, 2, -1), 1, DEPTH)
        length = np.where(outcome.active & ~outcome.cut, moved, length)
        return length, seconds + outcome.seconds


class ReadsStates(StopPolicy):
    """Continues where the hidden states of the draft and the target lie on one side of a plane."""

    name, features, hidden, first, max_depth = "reads-states", ("top1",), ("draft_hidden", "target_hidden"), 0, DEPTH

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        draft, target = step.hidden["draft_hidden"], step.hidden["target_hidden"]
        assert draft.shape[:2] == target.shape[:2] == step.alive.shape
        assert draft.dtype == target.dtype == np.float32
        if step.depth == 0:
            assert not draft.any(), "no draft forward was made yet"
            return step.alive & (self.score(target) > -1.5), state
        return step.alive & (self.score(draft) + 0.5 * self.score(target) > -0.4 * step.depth), state

    @staticmethod
    def score(states: Array) -> Array:
        """Return [S, B], a dot product in float64, so that no order of summation matters to a threshold."""
        plane = np.random.default_rng(8).standard_normal(states.shape[-1])
        return (states.astype(np.float64) * plane).sum(-1)


class ReadsDraftStates(ReadsStates):
    """Reads the draft's state only, from depth 1 on, and trims."""

    name, features, hidden, first, trims = "reads-draft-states", (), ("draft_hidden",), 1, True

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        assert list(step.hidden) == ["draft_hidden"]
        return step.alive & (self.score(step.hidden["draft_hidden"]) > -1.0), state


TEST_POLICIES: dict[str, StopPolicy] = {
    policy.name: policy
    for policy in (
        *(FixedLength(k) for k in (0, 1, 4, DEPTH)), Confidence(0.4, DEPTH), FromAnchor(), Trimming(), TrimmingFromAnchor(),
        Selecting(), TrimmingSelecting(), ReadsHistory(), Randomised(), Adaptive(), make_tree_policy(depth=DEPTH),
    )
}  # fmt: skip
"""One policy of each kind, none of which drafts deeper than `DEPTH`."""
