"""Logits that are not finite: those of the target end the run with one error, those of the draft do not change the text."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from small_drafters import small_drafter
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.policies.errors import PairError
from specstop.policies.fixed import FixedLength
from tape import record_calls
from transformers import PreTrainedModel

Prompts = list[list[int]]

NEW, LATER = 12, 6
MODES = {
    "match": Settings(0.0, NEW, ignore_eos=True),
    "match, sampled": Settings(0.7, NEW, ignore_eos=True, verification="match"),
    "match, a tree": Settings(0.7, NEW, ignore_eos=True, tree="3,2,1", verification="match"),
    "rejection": Settings(0.7, NEW, ignore_eos=True, verification="rejection"),
    "rejection, a tree": Settings(1.0, NEW, ignore_eos=True, verification="rejection", tree="2,2"),
    "rejection_replace": Settings(0.7, NEW, ignore_eos=True, verification="rejection_replace", tree="2,2"),
    "block": Settings(0.7, NEW, ignore_eos=True, verification="block"),
    "typical": Settings(0.7, NEW, ignore_eos=True, verification="typical"),
}
BAD = {"NaN": (math.nan, slice(7, 8)), "inf": (math.inf, slice(7, 8)), "all at -inf": (-math.inf, slice(None))}


def spoiled(model: PreTrainedModel, position: int, value: float, tokens: slice = slice(7, 8)) -> PreTrainedModel:
    """Return a copy whose logits after `position` and later are `value` for some tokens."""
    broken = copy.deepcopy(model)

    def spoil(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        late = kwargs["position_ids"][:, -out.logits.shape[1] :] >= position
        out.logits[..., tokens] = out.logits[..., tokens].masked_fill(late[..., None], value)
        return out

    broken.register_forward_hook(spoil, with_kwargs=True)
    return broken


def spoiled_pair(pair: Pair, role: str, *arguments: Any) -> Pair:
    return dataclasses.replace(pair, **{role: spoiled(getattr(pair, role), *arguments)})


def decode(pair: Pair, prompt: list[int], settings: Settings) -> list[int]:
    return list(Speculator(pair, FixedLength(3), settings).generate(prompt, 5).tokens)


def is_refused(role: str) -> Any:
    return pytest.raises(PairError, match=rf"^the {role}'s logits are not finite: [^\n]*$")


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_values_of_the_target_end_the_run_and_those_of_the_draft_do_not_change_the_text(
    pair: Pair, prompt_ids: Prompts, mode: str, value: str
) -> None:
    prompt, settings = prompt_ids[3], MODES[mode]
    late = len(prompt) + LATER
    for role, position in (("target", 0), ("target", late), ("draft", 0)):
        with is_refused(role):
            decode(spoiled_pair(pair, role, position, *BAD[value]), prompt, settings)
    later = spoiled_pair(pair, "draft", late, *BAD[value])
    if not mode.startswith(("match", "typical")):  # the probabilities of the draft matter
        with is_refused("draft"):
            decode(later, prompt, settings)
        return
    text = decode(later, prompt, settings)
    assert len(text) == NEW and (mode == "typical" or text == decode(pair, prompt, settings))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_values_that_are_not_finite_end_plain_decoding(
    pair: Pair, prompt_ids: Prompts, temperature: float, value: str
) -> None:
    with is_refused("target"):
        broken = spoiled_pair(pair, "target", 12, *BAD[value])
        plain_texts(broken, prompt_ids[:2], [1, 2], 20, temperature, ignore_eos=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_may_ban_tokens_by_minus_infinity(pair: Pair, prompt_ids: Prompts, mode: str) -> None:
    banned, settings = spoiled_pair(pair, "target", 0, -math.inf), MODES[mode]
    text = decode(banned, prompt_ids[2], settings)
    assert len(text) == NEW and 7 not in text
    if mode.startswith("match"):
        assert [text] == plain_texts(banned, [prompt_ids[2]], [5], NEW, settings.temperature, ignore_eos=True).tokens


@pytest.mark.parametrize("kind", ["model", "layer", "ctc", "recorded"])
def test_the_next_texts_of_a_loop_are_correct(
    plain_pair: Pair, prompt_ids: Prompts, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of a broken text remain in the caches behind masks, where zero times NaN is NaN."""
    if kind == "recorded":
        record_calls(monkeypatch)
    target = copy.deepcopy(plain_pair.target)
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = math.nan
    pair = dataclasses.replace(plain_pair, target=target)
    good = [Request([token for token in ids[:4] if token != 7], key) for key, ids in enumerate(prompt_ids[:2])]
    expected = None
    for _ in range(2):  # if calls are recorded, the second loop takes over the memory of the first
        drafter = None if kind in ("model", "recorded") else small_drafter(kind, pair)
        speculator = Speculator(pair, FixedLength(3), Settings(0.0, NEW, ignore_eos=True), batch=2, drafter=drafter)
        for _ in range(2):
            texts = [text.tokens for text in speculator.run(good)]
            expected = expected or texts
            assert texts == expected
            with pytest.raises(PairError):
                speculator.run([Request([*range(8, 14), *[7] * 9], key) for key in range(2)])
        del speculator
