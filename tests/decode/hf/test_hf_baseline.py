"""Transformers' own loop as a way to compare with: the target's text, and nothing of the library left changed."""

from __future__ import annotations

import pytest
from conftest import VOCABULARY, build_model
from specstop.decode.benchmark import bench
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted, AssistedSetting
from specstop.decode.loop import Request
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.errors import PairError
from specstop.policies.fixed import FixedLength
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.mark.parametrize("setting", [PLAIN, *SETTINGS], ids=lambda s: s.name)
def test_greedy_text_is_the_targets_and_the_assistant_gets_its_settings_back(
    pair: Pair, prompt_ids: list[list[int]], setting: AssistedSetting
) -> None:
    before = pair.draft.generation_config.to_dict()
    made = Assisted(pair, setting, Settings(max_new_tokens=12)).run([Request(prompt_ids[3])])[0]
    assert list(made.tokens) == plain_texts(pair, [prompt_ids[3]], [0], 12).tokens[0]
    assert made.seconds > 0.0
    assert pair.draft.generation_config.to_dict() == before


def test_vocabularies_of_two_sizes_are_measured_without_an_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    wide = join(build_model(vocab_size=VOCABULARY + 8), build_model(1), tokenizer)
    assert len(Assisted(wide, PLAIN, Settings(max_new_tokens=4, ignore_eos=True)).run([Request([7])])[0].tokens) == 4
    with pytest.raises(PairError, match=r"the target scores 56 tokens and the draft 48; measure with `library=False`$"):
        Assisted(wide, SETTINGS[0], Settings(max_new_tokens=4))


def test_plain_texts_are_generated_as_many_at_a_time_as_a_batch_has(pair: Pair, prompt_ids: list[list[int]]) -> None:
    asked = [Request(tokens, at) for at, tokens in enumerate(prompt_ids[1:4])]
    made = Assisted(pair, PLAIN, Settings(max_new_tokens=6, ignore_eos=True), batch=2).run(asked)
    assert [list(g.tokens) for g in made] == plain_texts(pair, prompt_ids[1:4], [0] * 3, 6, ignore_eos=True).tokens
    assert made[0].seconds == made[1].seconds != made[2].seconds, "texts of one call share its time"


def test_an_interval_is_over_turns_and_one_turn_has_none(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = prompt_ids[1:6]
    (plain, line) = bench(pair, prompts[:1], [FixedLength(2)], settings=Settings(max_new_tokens=6))
    assert line.ratio.value > 0.0 and line.ratio.low is None and line.to_dict()["high"] is None
    assert plain.to_dict()["ratio"] == 1.0
    lines = bench(pair, prompts, [FixedLength(2)], settings=Settings(max_new_tokens=6))
    assert lines[1].ratio.low is not None and lines[1].ratio.low < lines[1].ratio.value < lines[1].ratio.high
    together = bench(pair, prompts[:4], [FixedLength(2)], settings=Settings(max_new_tokens=6), batch=2)
    assert together[1].ratio.low is None, "four texts of a batch of two are one turn"


def test_two_policies_of_one_name_have_a_line_each(pair: Pair, prompt_ids: list[list[int]]) -> None:
    lines = bench(pair, [prompt_ids[1]], ["fixed:2", FixedLength(2), "fixed:0"], settings=Settings(max_new_tokens=6))
    assert [line.name for line in lines] == ["plain", "fixed:2", "fixed:2", "fixed:0"]
