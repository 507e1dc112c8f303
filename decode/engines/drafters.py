"""The drafters of a serving engine: any drafters of the loop that read no hidden states of the target."""

from __future__ import annotations

from typing import Any

import torch

from ...policies.contract import StopPolicy
from ...policies.errors import PairError
from ..drafters.base import Drafter
from ..drafters.spec import drafter_index, drafter_names, find_drafters, needs_draft, parse_spec
from ..models.engine import choose_engine, speed_up
from ..models.loading import load_model, load_tokenizer, open_checkpoint
from ..models.pair import Pair
from ..models.self_check import check_model
from ..models.view import READS_ALL
from .settings import check_engine_drafter


def load_engine_drafters(
    drafter: str, policy: StopPolicy, draft: str, target: str, device: torch.device, dtype: torch.dtype, vocabulary: int
) -> list[Drafter]:
    """Return the drafters for the requests of an engine: all of a spec if the policy routes, otherwise the one that it uses.

    Args:
        drafter: value of `--drafter`, or several, separated by +.
        policy: see `StopPolicy.drafter`.
        draft: folder or hub name of the draft model, if a drafter has one.
        target: folder or hub name of the engine's target, for its tokenizer.
        device, dtype: of the draft.
        vocabulary: number of tokens that the target scores.

    Raises:
        InputError: there is no such drafter, or it reads hidden states of the target.
        PolicyError: the policy names another drafter.
        PairError: a model cannot be loaded, or the draft has another vocabulary.
    """
    if not policy.routes:
        drafter = parse_spec(drafter)[drafter_index(policy, drafter_names(drafter))].format(str)
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
    drafters = find_drafters(drafter, pair)
    check_engine_drafter(drafter, reads=any(one.layers for one in drafters))  # a plugin may read states too
    return drafters
