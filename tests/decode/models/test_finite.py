"""Logits that are not finite: the target's end the run in one line, the draft's never reach the text."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_drafters import small_drafter
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.policies.errors import PairError
from specstop.policies.fixed import FixedLength
from transformers import PreTrainedModel

NEW, LATER = 12, 6
ALL = -math.inf
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
HARMLESS = ("match", "match, sampled", "match, a tree", "typical")
"""What the draft says has no weight in these."""


def spoiled(model: PreTrainedModel, position: int, value: float, tokens: slice = slice(7, 8)) -> PreTrainedModel:
    """Return a copy whose logits after `position` and later hold `value` for some tokens."""
    broken = copy.deepcopy(model)

    def spoil(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        rows = out.logits.shape[1]
        late = kwargs["position_ids"][:, -rows:] >= position
        out.logits[..., tokens] = out.logits[..., tokens].masked_fill(late[..., None], value)
        return out

    broken.register_forward_hook(spoil, with_kwargs=True)
    return broken


def with_target(pair: Pair, position: int, value: float, tokens: slice = slice(7, 8)) -> Pair:
    return dataclasses.replace(pair, target=spoiled(pair.target, position, value, tokens))


def with_draft(pair: Pair, position: int, value: float, tokens: slice = slice(7, 8)) -> Pair:
    return dataclasses.replace(pair, draft=spoiled(pair.draft, position, value, tokens))


def decode(pair: Pair, prompt: list[int], settings: Settings) -> list[int]:
    return list(Speculator(pair, FixedLength(3), settings).generate(prompt, 5).tokens)


BAD = {"NaN": (math.nan, slice(7, 8)), "inf": (math.inf, slice(7, 8)), "all at -inf": (ALL, slice(None))}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_broken_row_of_the_target_ends_the_run(
    pair: Pair, prompt_ids: list[list[int]], mode: str, value: str
) -> None:
    prompt = prompt_ids[3]
    for position in (0, len(prompt) + LATER):  # after the prompt, and in the middle of the text
        with pytest.raises(PairError, match=r"^the target's logits are not finite: ") as caught:
            decode(with_target(pair, position, *BAD[value]), prompt, MODES[mode])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_broken_row_ends_plain_decoding(
    pair: Pair, prompt_ids: list[list[int]], temperature: float, value: str
) -> None:
    bad = with_target(pair, 12, *BAD[value])
    with pytest.raises(PairError, match=r"^the target's logits are not finite: "):
        plain_texts(bad, prompt_ids[:2], [1, 2], 20, temperature, ignore_eos=True)


def test_a_text_that_has_ended_is_not_read_on_beside_the_others(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = [prompt_ids[0], prompt_ids[1]]
    expected = plain_texts(pair, prompts, [0, 0], NEW).tokens
    short = min(range(2), key=lambda i: len(expected[i]))
    assert len(expected[short]) < NEW or expected[0][-1] != expected[1][-1]
    watched, read = copy.deepcopy(pair.target), []
    watched.register_forward_hook(
        lambda _, args, kwargs, out: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    endings = dataclasses.replace(pair, target=watched, eos=(expected[short][-1],))
    made = plain_texts(endings, prompts, [0, 0], NEW).tokens
    assert made[short] == expected[short]
    together = min(map(len, made)) - 1  # what a text draws last is not read
    assert read == [*map(len, prompts), *[2] * together, *[1] * (max(map(len, made)) - 1 - together)]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_at_minus_infinity_are_a_models_right(pair: Pair, prompt_ids: list[list[int]], mode: str) -> None:
    banned = with_target(pair, 0, -math.inf)
    text = decode(banned, prompt_ids[2], MODES[mode])
    assert len(text) == NEW and 7 not in text
    if mode.startswith("match"):
        settings = MODES[mode]
        assert [text] == plain_texts(banned, [prompt_ids[2]], [5], NEW, settings.temperature, ignore_eos=True).tokens


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("mode", MODES)
def test_a_broken_row_of_the_draft_never_reaches_the_text(
    pair: Pair, prompt_ids: list[list[int]], mode: str, value: str
) -> None:
    prompt, settings = prompt_ids[3], MODES[mode]
    with pytest.raises(PairError, match=r"^the draft's logits are not finite: "):
        decode(with_draft(pair, 0, *BAD[value]), prompt, settings)
    later = with_draft(pair, len(prompt) + LATER, *BAD[value])
    if mode in HARMLESS:
        assert len(decode(later, prompt, settings)) == NEW
        if mode.startswith("match"):
            assert decode(later, prompt, settings) == decode(pair, prompt, settings)
    else:
        with pytest.raises(PairError, match=r"^the draft's logits are not finite: "):
            decode(later, prompt, settings)


def test_generate_ends_with_the_same_line(plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    bad, ids = spoiled(plain_pair.target, 5, math.nan), torch.tensor([prompt_ids[3]])
    with pytest.raises(PairError, match=r"^the target's logits are not finite: "):
        bad.generate(ids, custom_generate=specstop_generate, draft_model=plain_pair.draft, max_new_tokens=NEW)


@pytest.mark.parametrize("collector", ["dense", "live"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_collecting_ends_with_the_same_line(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, collector: str, role: str
) -> None:
    bad = with_target(pair, 12, math.nan) if role == "target" else with_draft(pair, 12, math.nan)
    with pytest.raises(PairError, match=f"^the {role}'s logits are not finite: "):
        collect(bad, prompts, tmp_path / "t", depth=3, max_new_tokens=20, shards=1, collector=collector)


@pytest.mark.parametrize("kind", ["model", "layer", "ctc"])
def test_the_next_texts_of_a_loop_are_right_after_one_that_was_not_finite(
    plain_pair: Pair, prompt_ids: list[list[int]], kind: str
) -> None:
    """What a broken text leaves in the caches is behind masks, where a NaN would still be one."""
    target = copy.deepcopy(plain_pair.target)
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = math.nan
    pair = dataclasses.replace(plain_pair, target=target)
    drafter = None if kind == "model" else small_drafter(kind, pair)
    speculator = Speculator(pair, FixedLength(3), Settings(0.0, NEW, ignore_eos=True), batch=2, drafter=drafter)
    good = [Request([token for token in ids[:4] if token != 7], key) for key, ids in enumerate(prompt_ids[:2])]
    texts = [text.tokens for text in speculator.run(good)]
    with pytest.raises(PairError):
        speculator.run([Request([*range(8, 14), *[7] * 9], 0), Request([*range(8, 14), *[7] * 9], 1)])
    assert [text.tokens for text in speculator.run(good)] == texts
