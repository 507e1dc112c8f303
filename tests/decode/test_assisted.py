"""Transformers' own loop as a way to compare with: the target's text, and nothing of the library left changed."""

from __future__ import annotations

import pytest
from specstop.decode.assisted import PLAIN, SETTINGS, Assisted, AssistedSetting
from specstop.decode.pair import Pair
from specstop.decode.plain import plain_texts
from transformers.generation import candidate_generator


@pytest.mark.parametrize("setting", [PLAIN, *SETTINGS], ids=lambda s: s.name)
def test_greedy_text_is_the_targets_and_the_assistant_gets_its_settings_back(
    pair: Pair, prompt_ids: list[list[int]], setting: AssistedSetting
) -> None:
    before, found = pair.draft.generation_config.to_dict(), candidate_generator.is_sklearn_available
    made = Assisted(pair, setting, 0.0, 12).generate(prompt_ids[3])
    assert list(made.tokens) == plain_texts(pair, [prompt_ids[3]], [0], 12).tokens[0]
    assert made.seconds > 0.0
    assert pair.draft.generation_config.to_dict() == before
    assert candidate_generator.is_sklearn_available is found
