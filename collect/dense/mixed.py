"""Token mixing (SpecDec++, arXiv 2405.19715): the draft reads a text in which most tokens are its own samples.

At each position i of the target's text X the draft proposes Y_i after X_<i, and its acceptance there is the label. What is
recorded as features is what the draft says after Z_<i, where Z takes X_i with a small chance and Y_i otherwise: it
is trained on states after its own tokens, which the text alone would not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...decode.models.cache import CachedModel
from ...decode.models.outputs import check_rows, stored
from ...decode.models.pair import Pair
from ...decode.plain import plain_texts
from ...decode.settings import Settings
from ...decode.summaries import summarise, truncation_lead
from ...decode.verify.noise import gumbel, match_scores
from ...decode.verify.sampler import Sampler
from ...policies.counter_rng import mix as scramble
from ...policies.features import BOUND, CHAIN_FEATURES, DRAFT_HIDDEN, TARGET_HIDDEN, Columns, DrawnTokens
from ..schema import PromptTask
from .collector import Written, text_columns, texts_at_once
from .unroll import MEMORY_BYTES, Unroller

_SALT = 0x317ED


@torch.inference_mode()
def mixed_rows(
    pair: Pair,
    batch: Sequence[PromptTask],
    settings: Settings,
    share: float,
    hidden: Sequence[str] = (),
    memory_bytes: int = MEMORY_BYTES,
) -> list[Mapping[str, Any]]:
    """Return the rows of a batch of prompts: one candidate a position.

    Args:
        pair: target and draft.
        batch: the prompts.
        settings: temperature, what else changes the distribution that is sampled from, and the limit of each text.
        share: of the target's tokens in what the draft reads.
        hidden: hidden states to record; the draft's are those after the mixed text as well.
        memory_bytes: for rows as wide as the vocabulary.
    """
    settings = settings.for_pair(pair)
    temperature, shaping, limit = settings.temperature, settings.shaping, settings.max_new_tokens + 1
    kept = [name for name in hidden if name != DRAFT_HIDDEN]
    unroller = Unroller(pair, 1, temperature, memory_bytes=memory_bytes, hidden=kept, shaping=shaping)
    at_once = texts_at_once(pair, limit, memory_bytes, noise=False)
    chunks = []
    for start in range(0, len(batch), at_once):
        part = batch[start : start + at_once]
        ids, keys = [one.tokens for one in part], [one.key for one in part]
        texts = plain_texts(pair, ids, keys, limit, temperature, hidden=TARGET_HIDDEN in hidden, shaping=shaping)
        states = [None] * len(part) if texts.states is None else texts.states
        for one, text, rows, state in zip(part, texts.tokens, texts.logits, states, strict=True):
            last = min(len(text), settings.max_new_tokens)
            if last < 2:
                continue
            anchor = torch.arange(1, last, device=pair.device)
            columns = text_columns(unroller, Written(one, text, rows[: len(text)], last, anchor, state))
            chunks.append(_mixed(pair, columns, one, text[:last], settings, share, DRAFT_HIDDEN in hidden))
    return chunks


def _mixed(
    pair: Pair,
    columns: Mapping[str, Any],
    one: PromptTask,
    text: list[int],
    settings: Settings,
    share: float,
    hidden: bool,
) -> Mapping[str, Any]:
    """Return the columns with the features (and hidden states) of the draft after the mixed text."""
    prompt, key, temperature = one.tokens, one.key, settings.temperature
    own = torch.tensor(columns["tokens"][:, 0], device=pair.device).long()  # Y_1 .. Y_{last - 1}
    at = torch.arange(len(prompt) + 1, len(prompt) + len(text), device=pair.device)
    # 24 bits keyed by stream and position alone: a text is mixed alike in every batch.
    chance = (scramble(scramble(at * 2 + 1) ^ (key ^ _SALT)) & ((1 << 24) - 1)).double() / (1 << 24)
    is_own = chance >= share
    read = torch.where(is_own, own, torch.tensor(text[1:], device=pair.device))
    # The first token is the target's in any case: nothing was proposed in its place.
    ids = torch.tensor([[*prompt, text[0], *read.tolist()[:-1]]], device=pair.device)
    model = CachedModel(pair.draft_model, ids.shape[1], pair.vocabulary, hidden, reading=pair.readings[1])
    logits = model.read(ids, rows=len(text) - 1)[0]
    check_rows(logits, "draft")
    # The noise that the samples Y were drawn with, at the same positions.
    noise = None if temperature == 0 else gumbel(key, at, pair.vocabulary, pair.logits_dtype)
    sampler = Sampler(settings.shaping.build(temperature, prompt, pair.eos, pair.device), temperature)
    tokens = ids[0].tolist()
    sampled = sampler(logits, lambda: [tokens[: len(prompt) + 1 + row] for row in range(len(logits))])
    scores = match_scores(sampled, noise)
    # The sample is seldom the best of these rows, so its own score must be looked up; a filter may leave it out here.
    # 2 BOUND below the best is beyond any bounded margin: it takes the place of -inf in noisy_score.
    top = scores.topk(2, -1).values
    best = torch.cat([scores.gather(-1, own[:, None]), top[:, 1:]], -1).maximum(top[:, :1] - 2 * BOUND)
    columns_of = Columns(CHAIN_FEATURES)
    drawn = DrawnTokens.of([(row, token, -1, 0, 1, 1) for row, token in enumerate(own.tolist())])
    if sampler.untruncated is not None:
        drawn.lead = truncation_lead(sampler.untruncated, sampled, drawn)
    shaped = sampled if sampler.reads_prefix and temperature > 0 else None
    summary = summarise(columns_of.needs, logits, drawn, temperature, shaped, best=best)
    features = columns_of(summary, drawn, temperature)
    made: dict[str, Any] = {name: features[:, [index]] for index, name in enumerate(CHAIN_FEATURES)}
    if model.states is not None:
        made[DRAFT_HIDDEN] = stored(model.states[0, -len(own) :]).cpu().numpy()
    before = torch.cat([torch.zeros_like(is_own[:1]), is_own[:-1]])  # whether the last token read was the draft's
    return {**columns, **made, "mixed": before.cpu().numpy()}
