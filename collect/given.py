"""Answers that exist already: one target pass says where they go on as the target itself would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decode.cache import CachedModel
from ..decode.finite import check_rows
from ..decode.hidden import stored
from ..decode.noise import gumbel, match_scores
from ..decode.pair import Pair
from ..policies.errors import InputError
from ..policies.features.hidden_states import TARGET_HIDDEN
from .dense import Written, text_columns
from .unroll import Unroller


@torch.inference_mode()
def completion_rows(
    pair: Pair,
    unroller: Unroller,
    batch: Sequence[tuple[int, str, str, list[int], int]],
    completions: Mapping[str, str],
    max_new_tokens: int,
) -> list[Mapping[str, Any]]:
    """Return the rows of given texts, of the anchors alone whose next K tokens are the target's own.

    Args:
        pair: target and draft.
        unroller: of the pair's draft.
        batch: (sequence, prompt id, group, token ids, stream key) of each prompt.
        completions: by prompt id.
        max_new_tokens: anchors lie before it.

    Raises:
        InputError: a prompt has no completion.
    """
    assert pair.tokenizer is not None
    chunks = []
    for sequence, name, group, prompt, key in batch:
        if name not in completions:
            raise InputError(f"--completions: prompt {name!r} has none")
        ids = list(pair.tokenizer(completions[name], add_special_tokens=False)["input_ids"])
        text = _until_end(ids, pair.eos)[: max_new_tokens + unroller.depth]
        last = min(len(text), max_new_tokens)
        if last < 2:
            continue
        rows, states = target_rows(pair, prompt, text, TARGET_HIDDEN in unroller.vectors)
        own = _own_tokens(pair, rows, len(prompt), key, unroller.temperature).tolist()
        anchors = own_anchors(text, own, last, unroller.depth, ended=text[-1] in pair.eos)
        if not anchors:
            continue
        anchor = torch.tensor(anchors, device=pair.device)
        written = Written((sequence, name, group, prompt, key), text, rows, last, anchor, states)
        chunks.append(text_columns(unroller, written))
    return chunks


def own_anchors(text: Sequence[int], own: Sequence[int], last: int, depth: int, ended: bool) -> list[int]:
    """Return the anchors 1 .. last - 1 behind which `depth` tokens of the text, or all up to its EOS, are the target's own.

    Args:
        text: given.
        own: what the target would have said in the place of each token.
        last: of the text.
        depth: K.
        ended: the text ends with EOS.
    """
    out = []
    for anchor in range(1, last):
        end = anchor + depth
        if end > len(text) and not ended:
            break
        if list(text[anchor:end]) == list(own[anchor:end]):
            out.append(anchor)
    return out


def target_rows(pair: Pair, prompt: list[int], text: list[int], hidden: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return [L, V], the target's rows that each token of the text would be drawn from, and their states [L, H] float16."""
    model = CachedModel(pair.target, len(prompt) + len(text), pair.vocabulary, hidden)
    rows = model.read(torch.tensor([[*prompt, *text[:-1]]], device=pair.device), rows=len(text))[0]
    check_rows(rows)
    return rows, None if model.states is None else stored(model.states[0, -len(text) :])


def _own_tokens(pair: Pair, rows: Tensor, start: int, key: int, temperature: float) -> Tensor:
    noise = None
    if temperature > 0:
        at = torch.arange(start, start + len(rows), device=pair.device)
        noise = gumbel(key, at, pair.vocabulary, pair.logits_dtype)
    return match_scores(rows, temperature, noise).argmax(-1)


def _until_end(tokens: list[int], eos: Sequence[int]) -> list[int]:
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in eos), tokens)
