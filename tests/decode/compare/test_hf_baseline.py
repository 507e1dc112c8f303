"""Transformers' own loop as a way to compare with: the target's text, and nothing of the library left changed."""

from __future__ import annotations

import pytest
from conftest import VOCABULARY, build_model
from specstop.decode.compare.hf_baseline import PLAIN, SETTINGS, Assisted, AssistedSetting
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.policies.errors import PairError
from transformers import PreTrainedTokenizerFast
from transformers.generation import candidate_generator


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


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


def test_vocabularies_of_two_sizes_are_measured_without_an_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    wide = join(build_model(vocab_size=VOCABULARY + 8), build_model(1), tokenizer)
    assert len(Assisted(wide, PLAIN, 0.0, 4, True).generate([7]).tokens) == 4
    with pytest.raises(PairError, match=r"the target scores 56 tokens and the draft 48; measure with --no-library$"):
        Assisted(wide, SETTINGS[0], 0.0, 4)
