"""Ends of text inside a round: stop strings, EOS lists, criteria of one's own, time, limits; with chains and trees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.records import Generation
from specstop.decode.settings import Settings, stop_strings
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria

TREES = [None, "3,2,1", "fork:2x5"]


@pytest.fixture(scope="module")
def endless_pair(pair: Pair) -> Pair:
    """The pair without an end of text, under its own forward."""
    return dataclasses.replace(pair, eos=())


@pytest.fixture(scope="module")
def twin(pair: Pair) -> Pair:
    """Draft and target are the same: every chain is accepted to its end."""
    return join(pair.target, pair.target, pair.tokenizer)


@pytest.fixture(scope="module", params=["twin", "pair"])
def models(request: pytest.FixtureRequest, pair: Pair, twin: Pair) -> Pair:
    return {"twin": twin, "pair": pair}[request.param]


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """One or two letters a token, so that a string may begin and end inside tokens."""
    words = [*"abcdefghijklmnopqrstuvwxyz ", *(first + second for first in "aeiou" for second in "stnr")]
    ids = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS}
    free = (i for i in range(3, VOCABULARY) if i != EOS)
    vocabulary = {**ids, **dict(zip(words, free, strict=False))}
    inner = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def generate(pair: Pair, prompts: list[list[int]], settings: Settings, length: int = 5) -> list[Generation]:
    speculator = Speculator(pair, FixedLength(length), settings)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def texts(generations: list[Generation]) -> list[list[int]]:
    return [list(g.tokens) for g in generations]


def stock(pair: Pair, prompt: list[int], **options: object) -> list[int]:
    """Return what the target's own `generate` writes."""
    ids = torch.tensor([prompt])
    out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options)
    return out[0, len(prompt) :].tolist()


def cut_inside(generations: list[Generation]) -> bool:
    """Whether a text ended in the middle of an accepted run."""
    return any(0 < g.rounds[-1].committed <= g.rounds[-1].accepted for g in generations if g.rounds)


@pytest.fixture(scope="module")
def whole(plain_pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Texts that nothing cuts."""
    return [stock(plain_pair, prompt) for prompt in prompt_ids]


@pytest.fixture(scope="module")
def stopped_at(
    plain_pair: Pair, letters: PreTrainedTokenizerFast, prompt_ids: list[list[int]], whole: list[list[int]]
) -> tuple[list[str], list[list[int]]]:
    """Strings: one token, the end of one and the beginning of the next, and one that never comes; and texts cut at them."""
    long = [letters.decode(text) for text in whole if len(text) > 10]
    strings = [long[0][7:10], long[1][8:9] + "Q", long[2][6:10]]
    return strings, [stock(plain_pair, p, stop_strings=strings, tokenizer=letters) for p in prompt_ids]


@pytest.mark.parametrize("tree", TREES)
def test_a_stop_string_ends_the_text_as_in_generate(
    models: Pair,
    letters: PreTrainedTokenizerFast,
    prompt_ids: list[list[int]],
    whole: list[list[int]],
    stopped_at: tuple[list[str], list[list[int]]],
    tree: str | None,
) -> None:
    spoken = dataclasses.replace(models, tokenizer=letters)
    strings, expected = stopped_at
    generations = generate(models, prompt_ids, Settings(0.0, NEW, tree=tree, stops=stop_strings(spoken, strings)))
    assert texts(generations) == expected
    stopped = [a for a, b in zip(expected, whole, strict=True) if len(a) < len(b)]
    assert len(stopped) >= 2
    assert all(any(s in letters.decode(text[-4:]) for s in strings) for text in stopped)
    if models.draft is models.target:
        assert cut_inside(generations)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_of_several_ends_of_text_cuts_there(
    models: Pair, prompt_ids: list[list[int]], tree: str | None, temperature: float
) -> None:
    """Also where another branch of the tree drew an end that is not the text's."""
    several = dataclasses.replace(models, eos=(16, 9, 30, 41))
    keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
    expected = plain_texts(several, prompt_ids, keys, NEW, temperature).tokens
    generations = generate(several, prompt_ids, Settings(temperature, NEW, tree=tree, verification="match"))
    assert texts(generations) == expected
    assert len({text[-1] for text in expected if text[-1] in several.eos}) > 1
    for generation in generations:
        assert not set(generation.tokens[:-1]) & set(several.eos)
    ended = [g.rounds[-1] for g in generations if g.rounds and g.tokens[-1] in several.eos]
    assert all(r.cut for r in ended)


class EachToken(StoppingCriteria):
    """Notes what it is asked, and stops after a token that stands at an odd place."""

    def __init__(self, token: int = -1) -> None:
        self.token, self.asked = token, []

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([int(input_ids[0, -1]) == self.token])


@pytest.mark.parametrize("tree", TREES)
def test_a_criterion_is_asked_after_each_token_in_order(
    twin: Pair, prompt_ids: list[list[int]], whole: list[list[int]], tree: str | None
) -> None:
    for prompt, expected in zip(prompt_ids[::2], whole[::2], strict=True):
        criterion = EachToken()
        text = generate(twin, [prompt], Settings(0.0, NEW, tree=tree, stops=(criterion,)))[0]
        assert list(text.tokens) == expected
        last = text.tokens[-1] in twin.eos or len(text.tokens) == NEW  # the text has ended: nobody asks
        assert criterion.asked == [
            [*prompt, *text.tokens[: n + 1]] for n in range(len(text.tokens) - int(last))
        ]  # fmt: skip


def test_the_first_of_several_criteria_that_fires_cuts_the_text(
    twin: Pair, prompt_ids: list[list[int]], whole: list[list[int]]
) -> None:
    prompt, expected = next(both for both in zip(prompt_ids, whole, strict=True) if len(both[1]) > 8)
    late, early = EachToken(expected[7]), EachToken(expected[3])
    for stops in ((late, early), (early, late)):
        text = generate(twin, [prompt], Settings(0.0, NEW, stops=stops))[0]
        assert list(text.tokens) == expected[: 1 + min(expected.index(expected[7]), expected.index(expected[3]))]
    assert cut_inside([text])


def test_a_criterion_may_end_the_text_at_its_first_token(
    twin: Pair, prompt_ids: list[list[int]], whole: list[list[int]]
) -> None:
    class Now(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> bool:
            return True

    text = generate(twin, prompt_ids[:1], Settings(0.0, NEW, stops=(Now(),)))[0]
    assert list(text.tokens) == whole[0][:1]
    assert text.rounds == ()


def test_a_time_limit_ends_the_text(twin: Pair, prompt_ids: list[list[int]], whole: list[list[int]]) -> None:
    prompt, expected = next(both for both in zip(prompt_ids, whole, strict=True) if len(both[1]) > 8)
    for tree in TREES:
        settings = Settings(0.0, NEW, tree=tree, stops=(MaxTimeCriteria(0.5, initial_timestamp=0.0),))
        assert list(generate(twin, [prompt], settings)[0].tokens) == expected[:1]
        later = MaxTimeCriteria(3600.0)
        settings = Settings(0.0, NEW, tree=tree, stops=(later,))
        assert list(generate(twin, [prompt], settings)[0].tokens) == expected


@pytest.mark.parametrize("tree", ["3,2,1", "fork:2x5", "parents:-1,-1,0,0,1,2,5"])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 6])
def test_the_length_limit_is_met_exactly_with_trees(
    endless_pair: Pair, prompt_ids: list[list[int]], tree: str, new: int
) -> None:
    keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
    for temperature in (0.0, 0.7):
        generations = generate(endless_pair, prompt_ids, Settings(temperature, new, tree=tree, verification="match"))
        assert texts(generations) == plain_texts(endless_pair, prompt_ids, keys, new, temperature).tokens
        for generation in generations:
            assert len(generation.tokens) == new
            for done in generation.rounds:
                left = new - done.anchor - 1  # tokens that may still be accepted: one place is the target's
                settings = Settings(0.0, new, tree=tree)
                assert done.drafted <= settings.topology.limited(left).nodes
                assert done.cut == (left < settings.topology.deepest or done.committed + done.anchor == new)


def test_nothing_is_drafted_below_an_end_of_text(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """Every token is an end of text for the drafter: no tree is deeper than one."""
    ends = dataclasses.replace(pair, eos=tuple(range(48)))
    for tree in TREES:
        settings = Settings(0.0, NEW, tree=tree)
        speculator = Speculator(pair, FixedLength(5), settings)
        speculator._source.eos = frozenset(ends.eos)
        for prompt in prompt_ids[:3]:
            rounds = speculator.generate(prompt).rounds
            assert {r.drafted for r in rounds} <= {0, speculator.topology.limited(1).nodes}
            assert all(r.cut for r in rounds)


def test_stop_strings_need_text_and_a_tokenizer(pair: Pair) -> None:
    assert stop_strings(pair, []) == ()
    with pytest.raises(InputError, match=r"stops: this pair's tokenizer cannot be searched for strings"):
        stop_strings(pair, ["w7"])  # of whole words
    for models, strings in ((pair, ["w7", ""]), (join(pair.target, pair.draft), ["w7"])):
        with pytest.raises(
            InputError, match=r"stops: expected strings that are not empty, and a pair with a tokenizer"
        ):
            stop_strings(models, strings)


def test_padding_is_seen_by_criteria_but_not_by_the_models(
    pair: Pair, prompt_ids: list[list[int]], whole: list[list[int]]
) -> None:
    criterion = EachToken()
    settings = Settings(0.0, 4, stops=(criterion,))
    (made,) = Speculator(pair, FixedLength(2), settings).run([Request(prompt_ids[3], padding=[0, 0])])
    assert list(made.tokens) == whole[3][:4]
    assert criterion.asked[0] == [0, 0, *prompt_ids[3], made.tokens[0]]
