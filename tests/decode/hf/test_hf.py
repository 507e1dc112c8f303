"""The Hugging Face surface: `generate` with our loop, and our policies on the stock loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import EOS, NEW
from specstop.decode import (
    SamplingParams,
    Settings,
    Speculator,
    plain_texts,
    specstop_generate,
    stream_key,
)
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from stock_generate import inputs, stock
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


def ours(pair: Pair, prompts: Sequence[Sequence[int]], **more: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "policy": "fixed:3", "draft_model": pair.draft, **more}
    return pair.target.generate(**inputs(prompts), custom_generate=specstop_generate, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": Confidence(0.4)}, {"tree": "3,2,1"}, {"verification": "rejection", "tree": "2,2"},
     {"drafter": "lookup", "draft_model": None}, {"drafter": "lookup:2", "draft_model": None, "tree": "3,1"}],
    ids=lambda o: "-".join(getattr(v, "name", str(v)) for v in o.values()) or "chain",
)  # fmt: skip
def test_greedy_text_is_that_of_generate(pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any]) -> None:
    for prompt in prompt_ids[1::3]:
        assert torch.equal(ours(pair, [prompt], **options), stock(pair, [prompt]))
    assert torch.equal(ours(pair, prompt_ids, **options), stock(pair, prompt_ids)), "a batch, padded on the left"


def test_the_draft_is_used(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """The draft is a copy of the target: far fewer calls of the target than tokens."""
    calls: list[int] = []
    draft = copy.deepcopy(pair.target)
    handle = pair.target.register_forward_hook(lambda *_: calls.append(1))
    try:
        ours(pair, prompt_ids[3:4], draft_model=draft, policy="fixed:5")  # models with a new hook are checked once
        calls.clear()
        text = ours(pair, prompt_ids[3:4], draft_model=draft, policy="fixed:5")
    finally:
        handle.remove()
    assert len(calls) < (text.shape[1] - len(prompt_ids[3])) / 3


def test_other_options_of_generate_are_honoured_greedily(pair: Pair, prompt_ids: list[list[int]]) -> None:
    cases: list[dict[str, Any]] = [
        {"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 18}, {"eos_token_id": [EOS, 9, 30]},
        {"max_length": 14, "max_new_tokens": None}, {"max_new_tokens": 1}, {"bad_words_ids": [[9], [30, 31]]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [t for t in range(48) if t % 3 != batch]},
    ]  # fmt: skip
    # On a chain and a tree in turn: that processors see every branch is in `test_sampling.py`.
    for at, options in enumerate(cases):
        made = ours(pair, prompt_ids[4:7], tree=(None, "3,2")[at % 2], **options)
        assert torch.equal(made, stock(pair, prompt_ids[4:7], **options))


@pytest.mark.parametrize("tree", [None, "3,2"])
def test_a_grammar_is_not_asked_what_comes_after_the_end(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None
) -> None:
    """`generate` asks for no token after the end of a text: a trie of whole texts has none there."""
    prompt, told = prompt_ids[4], []

    def allowed(batch: int, ids: Tensor) -> list[int]:
        written = ids.tolist()[len(prompt) :]
        told.append(written)
        if EOS in written:
            return []  # which transformers takes for an error
        return [EOS] if len(written) == 5 else [t for t in range(48) if t != EOS]

    made = ours(pair, [prompt], prefix_allowed_tokens_fn=allowed, tree=tree, draft_model=copy.deepcopy(pair.target))
    assert max(map(len, told)) >= 5 and made[0, -1] == EOS
    assert torch.equal(made, stock(pair, [prompt], prefix_allowed_tokens_fn=allowed))


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def test_sampling_is_reproducible_by_torchs_seed_or_by_ours(pair: Pair, prompt_ids: list[list[int]]) -> None:
    def sample(manual: int, **more: Any) -> list[list[int]]:
        torch.manual_seed(manual)
        return ours(pair, prompt_ids[3:6], **{**SAMPLING, **more}).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1, seed=5) == sample(2, seed=5)
    assert sample(1, seed=5) != sample(1, seed=6)
    match = {"verification": "match"}
    assert sample(1, **match) == sample(1, policy="confidence:0.3", tree="3,2", **match), "the text is the key's"
    assert sample(1, verification="rejection") == sample(1, verification="rejection")


@pytest.mark.parametrize(
    ("temperature", "options", "sampling"),
    [
        (0.8, {}, SamplingParams()),
        (1.0, {}, SamplingParams()),
        (0.8, {"top_k": 5}, SamplingParams(top_k=5)),
        (1.0, {"top_p": 0.6}, SamplingParams(top_p=0.6)),
        (0.8, {"min_p": 0.2}, SamplingParams(min_p=0.2)),
        (1.0, {"top_k": 9, "top_p": 0.8, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 8},
         SamplingParams(top_k=9, top_p=0.8, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=8)),
    ],
)  # fmt: skip
def test_sampling_options_are_those_of_the_loop(
    pair: Pair, prompt_ids: list[list[int]], temperature: float, options: dict[str, Any], sampling: SamplingParams
) -> None:
    """The same key gives the same text through `generate` and through the settings of the command line."""
    for prompt in prompt_ids[3:5]:
        made = ours(pair, [prompt], **{**SAMPLING, "temperature": temperature, **options}, seed=3)
        speculator = Speculator(
            pair, FixedLength(3), Settings(temperature, NEW, verification="auto", sampling=sampling)
        )
        assert made[0, len(prompt) :].tolist() == list(speculator.generate(prompt, stream_key(3, "0")).tokens)


def test_sampled_text_is_plain_sampling_with_the_rows_key(pair: Pair, prompt_ids: list[list[int]]) -> None:
    made = ours(pair, prompt_ids, **SAMPLING, seed=4, tree="3,2")
    keys = [stream_key(4, str(i)) for i in range(len(prompt_ids))]
    longest = max(map(len, prompt_ids))
    for row, text in zip(made.tolist(), plain_texts(pair, prompt_ids, keys, NEW, 0.8).tokens, strict=True):
        assert row[longest:] == text + [0] * (made.shape[1] - longest - len(text))


def test_several_texts_of_one_prompt_differ(pair: Pair, prompt_ids: list[list[int]]) -> None:
    for seed in (None, 7):
        torch.manual_seed(0)
        made = ours(pair, prompt_ids[4:6], **SAMPLING, num_return_sequences=3, seed=seed)
        assert made.shape[0] == 6
        assert len({tuple(row) for row in made.tolist()}) == 6
        assert [row[: len(prompt_ids[5])] for row in made.tolist()] == [
            row for row in inputs(prompt_ids[4:6])["input_ids"].tolist() for _ in range(3)
        ]


def test_return_dict_in_generate(pair: Pair, prompt_ids: list[list[int]]) -> None:
    made = ours(pair, prompt_ids[:2], return_dict_in_generate=True)
    assert torch.equal(made.sequences, stock(pair, prompt_ids[:2]))
    told = made.statistics
    assert told["texts"] == 2 and told["drafted"] >= told["accepted"] > 0
    assert told["acceptance"][0][0] == 1 and 0.0 < told["acceptance"][0][1] <= 1.0


class Until(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stopping_criteria_of_generate_are_asked(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = prompt_ids[3:6]
    for more in (2, 5, 8):
        criteria = StoppingCriteriaList([Until(max(map(len, prompts)) + more)])
        for tree in (None, "2,2"):
            made = ours(pair, prompts, stopping_criteria=criteria, tree=tree)
            assert torch.equal(made, stock(pair, prompts, stopping_criteria=criteria))
    text = stock(pair, prompts[:1])[0].tolist()
    mine = (EosTokenCriteria(text[-6]), MaxLengthCriteria(len(text) - 4))  # in the place of the configuration's
    for one in ([mine[0]], [mine[1]], [*mine]):
        made = ours(pair, prompts[:1], stopping_criteria=StoppingCriteriaList(one))
        assert torch.equal(made, stock(pair, prompts[:1], stopping_criteria=StoppingCriteriaList(one)))
        assert made.shape[1] < len(text)
    soon = ours(pair, prompts, max_time=1e-9)
    assert soon.shape[1] == max(map(len, prompts)) + 1


class Pieces(TextStreamer):
    """Keeps what would be printed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text, self.ends = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.ends += stream_end


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_gets_what_generate_would_give_it(
    pair: Pair, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[list[int]], skip_prompt: bool
) -> None:
    for prompt in prompt_ids[2:5]:
        mine, theirs = (Pieces(tokenizer, skip_prompt=skip_prompt) for _ in range(2))
        ours(pair, [prompt], text_streamer=mine, policy="fixed:4")
        stock(pair, [prompt], streamer=theirs)
        assert mine.text == theirs.text
        assert (mine.ends, theirs.ends) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": None}, r"expected draft_model= \(assistant_model= does not reach a callable\)"),
        ({"drafter": "lookup"}, "the drafter lookup takes no draft model; leave draft_model="),
        ({"num_beams": 3}, "beam search is not speculative; expected num_beams=1"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True: a round does not return"),
        ({"verification": "matsch"}, "expected auto or one of match, rejection.*did you mean 'match'"),
        ({"tree": "x"}, "tree: expected widths"),
        ({"drafter": "medusa"}, "drafter: expected one of model, lookup"),
        ({"tree": "3,2", "verification": "block", "do_sample": True}, "block: expected a chain"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        ours(pair, prompt_ids[:1], **options)
    assert "\n" not in str(error.value)


def test_a_streamer_shows_one_text(pair: Pair, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[list[int]]) -> None:
    with pytest.raises(InputError, match="a streamer shows one text; expected a batch of one"):
        ours(pair, prompt_ids[:2], text_streamer=Pieces(tokenizer))
