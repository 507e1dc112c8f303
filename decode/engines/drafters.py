"""The drafter of a serving engine: any drafter of the loop that reads no hidden states of the target."""

from __future__ import annotations

from typing import Any

import torch

from ...policies.errors import PairError
from ..drafters.base import Drafter
from ..drafters.spec import find_drafters, needs_draft
from ..models.engine import choose_engine, speed_up
from ..models.loading import load_model, load_tokenizer, open_checkpoint
from ..models.pair import Pair
from ..models.self_check import check_model
from ..models.view import READS_ALL
from .settings import check_engine_drafter


def load_engine_drafter(
    drafter: str, draft: str, target: str, device: torch.device, dtype: torch.dtype, vocabulary: int
) -> Drafter:
    """Return the drafter for the requests of an engine.

    Args:
        drafter: value of `--drafter`.
        draft: folder or hub name of the draft model, if the drafter has one.
        target: folder or hub name of the engine's target, for its tokenizer.
        device, dtype: of the draft.
        vocabulary: number of tokens that the target scores.

    Raises:
        InputError: there is no such drafter, or it reads hidden states of the target.
        PairError: a model cannot be loaded, or the draft has another vocabulary.
    """
    model, reading = None, READS_ALL
    if needs_draft(check_engine_drafter(drafter)):
        checkpoint = open_checkpoint(draft, "draft")
        size = int(checkpoint.config.get_text_config().vocab_size)
        if abs(size - vocabulary) >= 512:  # vocabularies that are padded to different sizes differ by less
            raise PairError(
                f"draft: {draft} scores {size} tokens, but the target {vocabulary}; choose a draft of the target's family"
            )
        model = load_model(checkpoint, device, dtype).eval()
        reading = check_model("draft", model)
        model = speed_up(model, choose_engine(model))
    skeleton: Any = model
    tokenizer = None
    if drafter != "model":  # others may read the tokenizer or the config of the target
        checkpoint = open_checkpoint(target, "target")
        skeleton, tokenizer = checkpoint.skeleton, load_tokenizer(checkpoint)
        skeleton = skeleton.to(dtype)  # without weights, because the engine has the target
    readings = (READS_ALL, reading)
    pair = Pair(skeleton, model, tokenizer, vocabulary, drafter=drafter, call_device=device, readings=readings)
    proposer = find_drafters(drafter, pair)[0]
    check_engine_drafter(drafter, reads=bool(proposer.layers))  # a plugin may read states too
    return proposer
