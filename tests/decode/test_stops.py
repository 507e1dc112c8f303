"""Ends of text inside a round: stop strings, several end tokens, criteria, time limits; with chains and trees."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.records import Generation
from specstop.decode.settings import Settings, stop_strings
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria

TREES = [None, "3,2,1", "fork:2x5"]


@pytest.fixture(scope="module")
def twin(pair):
    """Draft and target are the same: every chain is accepted to its end."""
    return join(pair.target, pair.target, pair.tokenizer)


@pytest.fixture(scope="module")
def letters():
    """One or two letters a token, so that a string may begin and end inside tokens."""
    words = [*"abcdefghijklmnopqrstuvwxyz ", *(first + second for first in "aeiou" for second in "stnr")]
    ids = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS}
    free = (i for i in range(3, VOCABULARY) if i != EOS)
    inner = Tokenizer(BPE({**ids, **dict(zip(words, free, strict=False))}, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def generate(pair: Pair, prompts: list[list[int]], settings: Settings, length: int = 5) -> list[Generation]:
    speculator = Speculator(pair, FixedLength(length), settings)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def library_text(pair: Pair, prompt: list[int], **options: Any) -> list[int]:
    """Return what `generate` of transformers adds."""
    ids = torch.tensor([prompt])
    out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options)
    return out[0, len(prompt) :].tolist()


def ends_in_a_round(generations: list[Generation]) -> bool:
    """Return whether a text ended in the middle of accepted tokens."""
    return any(0 < g.rounds[-1].committed <= g.rounds[-1].accepted for g in generations if g.rounds)


@pytest.fixture(scope="module")
def whole(plain_pair, prompt_ids):
    return [library_text(plain_pair, prompt) for prompt in prompt_ids]


@pytest.mark.parametrize("models", ["twin", "pair"])
def test_a_stop_string_ends_the_text_as_in_generate(models, request, plain_pair, letters, prompt_ids, whole):
    """One token, the end of one and the beginning of the next, and a string that never comes."""
    pair = dataclasses.replace(request.getfixturevalue(models), tokenizer=letters)
    long = [letters.decode(text) for text in whole if len(text) > 10]
    strings = [long[0][7:10], long[1][8:9] + "Q", long[2][6:10]]
    expected = [library_text(plain_pair, p, stop_strings=strings, tokenizer=letters) for p in prompt_ids]
    assert sum(len(text) < len(uncut) for text, uncut in zip(expected, whole, strict=True)) >= 2
    for tree in TREES:
        settings = Settings(0.0, NEW, tree=tree, stops=stop_strings(pair, strings))
        generations = generate(pair, prompt_ids, settings)
        assert [list(g.tokens) for g in generations] == expected
        assert models == "pair" or ends_in_a_round(generations)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_of_several_end_tokens_ends_the_text(twin, prompt_ids, tree, temperature):
    """Also where another branch of the tree drew an end that is not the text's."""
    several = dataclasses.replace(twin, eos=(16, 9, 30, 41))
    keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
    expected = plain_texts(several, prompt_ids, keys, NEW, temperature).tokens
    generations = generate(several, prompt_ids, Settings(temperature, NEW, tree=tree, verification="match"))
    assert [list(g.tokens) for g in generations] == expected
    assert len({text[-1] for text in expected if text[-1] in several.eos}) > 1
    assert not any(set(g.tokens[:-1]) & set(several.eos) for g in generations)
    assert all(g.rounds[-1].cut for g in generations if g.rounds and g.tokens[-1] in several.eos)
    assert ends_in_a_round(generations)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_after_an_end_of_text_do_not_count(pair, prompt_ids, temperature):
    """A fixed length does not read its tokens while it drafts them; the records are those of a policy that does."""
    settings, ended = Settings(temperature, 40, verification="match"), 0
    for eos in range(0, 48, 8):
        ending = dataclasses.replace(pair, eos=(eos,))
        fixed, reading = (
            [Speculator(ending, policy, settings).generate(prompt, 1) for prompt in prompt_ids[:3]]
            for policy in (FixedLength(4), Confidence(0.0, 4))
        )
        for text, other in zip(fixed, reading, strict=True):
            assert text.tokens == other.tokens
            rounds, others = (
                [(r.drafted, r.verified, r.accepted, r.committed, r.cut, r.backlog) for r in one.rounds]
                for one in (text, other)
            )
            assert rounds == others
            ended += sum(r.drafted < 4 and r.context < len(text.tokens) for r in text.rounds)
    assert ended > 1


class AtToken(StoppingCriteria):
    """Records its calls and stops after a token."""

    def __init__(self, token: int = -1) -> None:
        self.token, self.calls = token, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append(input_ids[0].tolist())
        return torch.tensor([int(input_ids[0, -1]) == self.token])


@pytest.mark.parametrize("tree", TREES)
def test_criteria_are_called_after_each_token_in_order_and_end_the_text(twin, prompt_ids, whole, tree):
    for prompt, expected in zip(prompt_ids[::2], whole[::2], strict=True):
        criterion = AtToken()
        (text,) = generate(twin, [prompt], Settings(0.0, NEW, tree=tree, stops=(criterion,)))
        assert list(text.tokens) == expected
        has_ended = text.tokens[-1] in twin.eos or len(text.tokens) == NEW
        assert criterion.calls == [[*prompt, *text.tokens[: n + 1]] for n in range(len(text.tokens) - has_ended)]
        late, early = AtToken(expected[-1]), AtToken(expected[len(expected) // 2])
        (text,) = generate(twin, [prompt], Settings(0.0, NEW, tree=tree, stops=(late, early)))
        assert list(text.tokens) == expected[: 1 + expected.index(early.token)], "the first that fires ends the text"


def test_stop_strings_require_text_and_a_tokenizer_that_can_be_searched(pair):
    assert stop_strings(pair, []) == ()
    for models, strings in ((pair, ["w7"]), (pair, ["w7", ""]), (join(pair.target, pair.draft), ["w7"])):
        with pytest.raises(InputError, match=r"^stops: .*tokenizer"):
            stop_strings(models, strings)
