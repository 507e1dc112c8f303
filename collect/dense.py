"""The dense collector: the target's text once, then the draft unrolled from every position at once.

Under `match` the committed text does not depend on the policy, so one plain text holds every anchor that any policy can
visit. From each anchor the draft is unrolled (`unroll`); labels compare with the text and cost no further target call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decode.pair import Pair
from ..decode.plain import plain_texts
from ..policies.features import ANCHOR_FEATURES, Rows, compute
from .unroll import Anchors, Unroller


def dense_rows(
    pair: Pair,
    unroller: Unroller,
    batch: Sequence[tuple[int, str, str, list[int], int]],
    max_new_tokens: int,
) -> list[Mapping[str, Any]]:
    """Return the rows of a batch of prompts, one column chunk per text.

    Args:
        pair: target and draft.
        unroller: of the pair's draft.
        batch: (sequence, prompt id, group, token ids, stream key) of each prompt.
        max_new_tokens: limit of each text; it is read K tokens further so that the last anchors have labels.
    """
    texts = plain_texts(
        pair,
        [b[3] for b in batch],
        [b[4] for b in batch],
        max_new_tokens + unroller.depth,
        unroller.temperature,
    )
    chunks = []
    for (sequence, name, group, prompt, key), text, rows in zip(batch, texts.tokens, texts.logits, strict=True):
        last = min(len(text), max_new_tokens)
        if last > 1:
            chunks.append(
                _text_rows(
                    unroller,
                    sequence,
                    name,
                    group,
                    prompt,
                    key,
                    text,
                    rows[: len(text)],
                    last,
                    ended=text[-1] in pair.eos,
                )
            )
    return chunks


def _text_rows(
    unroller: Unroller,
    sequence: int,
    name: str,
    group: str,
    prompt: list[int],
    key: int,
    text: list[int],
    target_rows: Tensor,
    last: int,
    ended: bool,
) -> Mapping[str, Any]:
    """Return the columns of one text: anchors 1 .. last - 1."""
    device = target_rows.device
    anchor = torch.arange(1, last, device=device)
    trees = unroller.unroll(Anchors(prompt + text, len(prompt), anchor, key), target_rows)
    own = torch.tensor(text[: last - 1], device=device)
    anchor_rows = Rows(target_rows[: last - 1], tokens=own)
    columns: dict[str, Any] = {
        "prompt_id": [name] * (last - 1),
        "group": [group] * (last - 1),
        "sequence": [sequence] * (last - 1),
        "prompt_tokens": [len(prompt)] * (last - 1),
        "text_tokens": [last] * (last - 1),
        "anchor": anchor,
        "tokens": trees.tokens,
        "draft_prob": trees.draft_prob.float(),
        "target_prob": trees.target_prob.float(),
        "overlap": trees.overlap.float(),
        "accepted": trees.accepted,
        "labelled": trees.labelled,
        "accepted_length": trees.accepted.sum(1),
        "cut": (anchor + unroller.depth > len(text)) & ended,
    }
    columns.update(zip(ANCHOR_FEATURES, compute(ANCHOR_FEATURES, anchor_rows).unbind(1), strict=True))
    columns.update(zip(unroller.features, trees.features.unbind(2), strict=True))
    return {name: v.cpu().numpy() if isinstance(v, Tensor) else v for name, v in columns.items()}
