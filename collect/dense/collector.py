"""The dense collector: the target's text once, then the draft unrolled from every position at once.

Under every lossless verification the text has the target's law whatever the policy, so one plain text holds every anchor
that any policy can visit. From each anchor the draft is unrolled (`unroll`). Under `match` the labels compare with the text,
exact path by path; under `rejection` and `block` drafts and acceptances are drawn given the text, exact in law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...decode.models.pair import Pair
from ...decode.plain import plain_texts
from ...decode.summaries import summarise
from ...policies.contract import Array
from ...policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, TARGET_HIDDEN, Columns, DrawnTokens
from ..schema import PromptTask
from .threads import map_threads
from .unroll import Anchors, Unroller


@dataclass(frozen=True)
class Written:
    """A text and what the target said of it.

    Attributes:
        work: the prompt.
        text: generated ids; anchors look past `last`.
        target_rows: [L, V], the target's row that each was drawn from.
        last: tokens of the text that count.
        anchor: [n] of 1 .. last - 1, rising.
        target_states: [L, H] float16, the hidden states of `target_rows`, if the unroller is to record them.
        noise: [L, V] that the text was drawn with, where it is at hand.
        draw: number of the draw given the text, of `Unroller.draws`.
    """

    work: PromptTask
    text: list[int]
    target_rows: Tensor
    last: int
    anchor: Tensor
    target_states: Tensor | None = None
    noise: Tensor | None = None
    draw: int = 0


def dense_rows(
    pair: Pair,
    unroller: Unroller,
    batch: Sequence[PromptTask],
    max_new_tokens: int,
) -> list[Mapping[str, Any]]:
    """Return the rows of a batch of prompts, one column chunk per text.

    Args:
        pair: target and draft.
        unroller: of the pair's draft.
        batch: the prompts.
        max_new_tokens: limit of each text; it is read K tokens further so that the last anchors have labels.
    """
    longest, temperature = max_new_tokens + unroller.depth, unroller.temperature
    hidden, noisy = TARGET_HIDDEN in unroller.hidden, unroller.verification == "match"
    side_by_side = texts_at_once(pair, longest, unroller.memory_bytes, noise=temperature > 0 and noisy)
    chunks: list[Mapping[str, Any]] = []
    for start in range(0, len(batch), side_by_side):
        part = batch[start : start + side_by_side]
        ids, keys = [one.tokens for one in part], [one.key for one in part]
        made = plain_texts(pair, ids, keys, longest, temperature, hidden=hidden, noise=noisy, shaping=unroller.shaping)
        work: list[Written] = []
        for at, (one, text) in enumerate(zip(part, made.tokens, strict=True)):
            last = min(len(text), max_new_tokens)
            # The first token is drawn as the prompt is read, before any round: a text of one token has no anchor.
            if last > 1:
                rows, states, noise = (
                    v if v is None else v[at, : len(text)] for v in (made.logits, made.states, made.noise)
                )
                assert rows is not None
                anchor = torch.arange(1, last, device=pair.device)
                work += [Written(one, text, rows, last, anchor, states, noise, draw) for draw in range(unroller.draws)]
        chunks += map_threads(unroller, text_columns, work)
    return chunks


def texts_at_once(pair: Pair, tokens: int, memory_bytes: int, noise: bool) -> int:
    """Return of how many texts `plain_texts` can hold all rows, [texts, tokens, V], and as much `noise`; 1 at least."""
    wide = pair.vocabulary * torch.finfo(pair.logits_dtype).bits // 8 * (2 if noise else 1)
    return max(1, memory_bytes // (tokens * wide))


@torch.inference_mode()
def text_columns(unroller: Unroller, written: Written) -> Mapping[str, Any]:
    """Return the columns of one text, its draft unrolled."""
    work, text, target_rows, anchor = written.work, written.text, written.target_rows, written.anchor
    anchors_of = Anchors(work.tokens + text, len(work.tokens), anchor, work.key, written.noise, written.draw)
    trees = unroller.unroll(anchors_of, target_rows)
    # Anchor a is the token text[a - 1], drawn from row a - 1; before the first one stands the prompt's last.
    anchors = anchor_columns(
        target_rows[anchor - 1], text, [work.tokens[-1], *text], [at - 1 for at in anchor.tolist()]
    )
    ended = text[-1] in unroller.pair.eos
    # `trace_arrays` finds the draw again as the remainder by `draws`.
    drawn = work._replace(sequence=work.sequence * unroller.draws + written.draw)
    columns = drawn.columns(len(anchor), written.last) | {
        "anchor": anchor,
        "tokens": trees.tokens,
        "draft_prob": trees.draft_prob.float(),
        "target_prob": trees.target_prob.float(),
        "overlap": trees.overlap.float(),
        "accepted": trees.accepted,
        "observed": trees.labelled,
        "accepted_length": trees.accepted.sum(1),  # of a depth one node at most is on the text
        # EOS alone cuts a round: past the limit the text goes on for K tokens.
        "cut": (anchor + unroller.depth > len(text)) & ended,
    }
    columns.update(zip(ANCHOR_FEATURES, anchors.T, strict=True))
    columns.update(zip(unroller.features, trees.features.unbind(2), strict=True))
    if trees.chance is not None and trees.some is not None:
        columns |= {"accept_chance": trees.chance.float(), "next_chance": trees.some.float()}
    if trees.hidden is not None:
        columns[DRAFT_HIDDEN] = trees.hidden
    if written.target_states is not None:
        columns[TARGET_HIDDEN] = written.target_states[anchor - 1]
    return {key_: v.cpu().numpy() if isinstance(v, Tensor) else v for key_, v in columns.items()}


def anchor_columns(rows: Tensor, text: Sequence[int], before: Sequence[int], at: Sequence[int]) -> Array:
    """Return [n, F] float32, the ANCHOR features of n anchors.

    Args:
        rows: [n, V] the target's rows that they were drawn from.
        text, before: by place, the anchor token and the one before it.
        at: [n] places of the anchors.
    """
    columns = Columns(ANCHOR_FEATURES)
    drawn = DrawnTokens.of([(row, text[place], before[place], 0, 1, 0) for row, place in enumerate(at)])
    # Temperature 0 stands for the raw rows: no ANCHOR feature reads the distribution that is sampled from.
    return columns(summarise(columns.needs, rows, drawn, 0.0), drawn, 0.0)
