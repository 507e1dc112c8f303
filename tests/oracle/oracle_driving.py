"""Drive a policy through rounds of synthetic steps, as a loop would, and note what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from specstop.policies import DraftStep, DraftTree, RoundOutcome, StopPolicy

Array = np.ndarray[Any, Any]

DEEPEST = 5
HISTORY = ("mean_accepted", "mean_full", "last_accepted", "last_verified")
ANCHOR = (
    "anchor_entropy",
    "anchor_top1",
    "anchor_margin",
    "anchor_prob",
    "anchor_token",
    "before_token",
    "temperature",
)
RANGES = {
    "anchor_entropy": (0.0, 4.0),
    "entropy": (0.0, 3.0),
    "top1_logit": (-4.0, 10.0),
    "path_logprob": (-5.0, 0.0),
    "noisy_margin": (0.0, 5.0),
    "noisy_score": (-4.0, 4.0),
    "noisy_lead": (-4.0, 4.0),
    "mean_accepted": (0.0, 5.0),
    "last_accepted": (0.0, 5.0),
    "last_verified": (0.0, 5.0),
    "temperature": (0.8, 0.8),
}
"""Of features that are no probabilities; ids and places are made otherwise."""
IDS = ("anchor_token", "before_token", "drawn_token", "above_token")


@dataclass(frozen=True)
class Drive:
    """How a policy is driven.

    Attributes:
        streams: S.
        branches: of each depth below the root.
        rounds: their number.
        batch: `alone` = each stream a batch of its own; `together` = all in one; `two` = in two batches.
        hidden_tokens: select is asked level by level, and is not shown the tokens.
        width: of the hidden states.
    """

    streams: int = 5
    branches: int = 1
    rounds: int = 4
    batch: str = "alone"
    hidden_tokens: bool = False
    width: int = 16

    @property
    def name(self) -> str:
        """Short text that tells drives apart."""
        told = f"S={self.streams} B={self.branches} rounds={self.rounds} {self.batch}"
        return told + (" by-level" if self.hidden_tokens else "")


def features_at(names: tuple[str, ...], depth: int, shape: tuple[int, int], dice: np.random.Generator) -> Array:
    """Return features [S, B, F] drawn within their ranges."""
    out = np.zeros((*shape, len(names)), dtype=np.float32)
    for at, name in enumerate(names):
        if name in IDS:
            values = dice.integers(0, 48, shape).astype(np.float32)
        elif name == "depth":
            values = np.full(shape, depth, dtype=np.float32)
        elif name == "branch_rank":
            values = np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape)
        else:
            low, high = RANGES.get(name, (0.0, 1.0))
            values = (low + (high - low) * dice.random(shape)).astype(np.float32)
            if high == 1.0 and name not in ("mean_full", "anchor_margin", "margin"):
                values = np.sqrt(values)  # drafts are mostly sure
        known = depth > 0 or name in HISTORY or name in ANCHOR
        out[..., at] = values if known else 0.0
    return out


def hidden_at(
    policy: StopPolicy, depth: int, shape: tuple[int, int], width: int, dice: Any, anchor: Array
) -> dict[str, Array]:
    """Return hidden states by name, rounded to float16 as a loop shows them."""
    sizes = getattr(policy, "sizes", {})
    out = {}
    for name in policy.hidden:
        size = sizes.get(name, width)
        drawn = dice.standard_normal((*shape, size)) * (depth > 0)
        values = np.repeat(anchor[:, None, :size], shape[1], 1) if name == "target_hidden" else drawn
        out[name] = np.ascontiguousarray(values.astype(np.float16).astype(np.float32))
    return out


def bits(mask: Array) -> str:
    """Return a mask [S, B] as text, a word for each stream."""
    return " ".join("".join("01"[int(value)] for value in row) for row in mask)


def drive(policy: StopPolicy, how: Drive, seed: int = 5) -> list[str]:
    """Return the answers of `keep` and `select` of all rounds, as text.

    Each answer is `depth: mask` for `keep`, and `s: mask` (or `s: all`) for `select`; rounds begin with a line of their own.
    """
    dice = np.random.default_rng(seed)
    policy = policy.limited(DEEPEST)
    keys = np.array([7919 * stream + 1 for stream in range(how.streams)], dtype=np.int64)
    state, said = policy.start(how.streams, keys), []
    for number in range(how.rounds):
        active = dice.random(how.streams) < 0.9
        if how.rounds == 1 or not active.any():
            active[:] = True
        batch = {
            "alone": np.arange(how.streams),
            "together": np.zeros(how.streams, dtype=np.int64),
            "two": np.arange(how.streams) % 2,
        }[how.batch].copy()
        batch[~active] = -1
        said.append(f"round {number}")
        state = _round(policy, how, dice, state, active, batch, said)
    return said


def _round(
    policy: StopPolicy, how: Drive, dice: np.random.Generator, state: Any, active: Array, batch: Array, said: list[str]
) -> Any:
    """Play a round; return the state after it."""
    streams = how.streams
    anchor = dice.standard_normal((streams, 64))
    extends = active[:, None].copy()
    tokens, parents, depths, drawn = (
        np.zeros((streams, 0), dtype=kind) for kind in (np.int64, np.int64, np.int64, bool)
    )
    asked = 0
    for depth in range(policy.max_depth + 1):
        width = how.branches if depth else 1
        shape = streams, width
        if depth:
            above = extends.shape[1]
            # The parents of a level rise, as rows of a tree do.
            parent = np.sort(dice.integers(0, above, shape), 1)
            alive = np.take_along_axis(extends, parent, 1)
            first = depths.shape[1] - above if depth > 1 else -1
            tokens = np.concatenate([tokens, np.where(alive, dice.integers(0, 48, shape), -1)], 1)
            parents = np.concatenate([parents, parent + first if depth > 1 else np.full(shape, -1)], 1)
            depths = np.concatenate([depths, np.full(shape, depth)], 1)
            drawn = np.concatenate([drawn, alive], 1)
        else:
            parent, alive = np.zeros(shape, dtype=np.int64), extends.copy()
        features = features_at(policy.features, depth, shape, dice) * alive[..., None]
        hidden = hidden_at(policy, depth, shape, how.width, dice, anchor)
        if depth and how.hidden_tokens and alive.any():
            tree = DraftTree(np.full_like(tokens, -1), parents, depths, drawn)
            mask = policy.select(tree, state)
            said.append(f"s{depth}: all" if mask is None else f"s{depth}: {bits(mask)}")
            if mask is not None:
                drawn = drawn & np.where(depths == depth, mask, True)
                alive = alive & drawn[:, -width:]
        if not alive.any():
            break
        if policy.first <= depth < policy.max_depth:
            step = DraftStep(depth, alive, parent, features, hidden, batch)
            extends, state = policy.keep(step, state)
            asked += 1
            said.append(f"{depth}: {bits(extends)}")
            if policy.trims and depth:
                drawn = np.concatenate([drawn[:, :-width], drawn[:, -width:] & extends], 1)
        else:
            extends = alive.copy()
        if not extends.any():
            break
    sent = drawn
    if not how.hidden_tokens:
        mask = policy.select(DraftTree(np.where(drawn, tokens, -1), parents, depths, drawn), state)
        said.append("s: all" if mask is None else f"s: {bits(mask)}")
        sent = drawn if mask is None else drawn & mask
    verified = sent.sum(1)
    deepest = np.where(sent, depths, 0).max(1, initial=0)
    accepted = np.minimum(deepest, dice.integers(0, DEEPEST + 1, streams))
    outcome = RoundOutcome(
        active,
        drawn.sum(1),
        verified,
        accepted * active,
        (dice.random(streams) < 0.1) & active,
        np.where(active, 1e-3 * (4 + dice.integers(0, 3, streams)), 0.0),
    )
    return policy.observe(outcome, state)
