"""Logits processors in chain and tree: the text of plain decoding with them, and never a token that they forbid."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import gumbel
from specstop.decode.verify.sampler import Sampler
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence, FixedLength
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

TREES = ["3,2,1", "parents:-1,-1,0,0,1,2,5"]
KEY = 91


def on_chain_and_tree(names: Iterable[str]) -> list[tuple[str, str | None]]:
    """Each on a chain and on one of the trees, in turn."""
    return [(name, tree) for at, name in enumerate(names) for tree in (None, TREES[at % 2])]


def allowed(batch: int, ids: Tensor) -> list[int]:
    """Tokens that leave another remainder by 3 than the last one: the answer depends on the prefix."""
    assert batch == 0, "every row stands for the one text"
    return [token for token in range(VOCABULARY) if token % 3 != int(ids[-1]) % 3]


class Alternating(LogitsProcessor):
    """Forbids low tokens after a text of even length: the answer depends on how long the prefix is."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(VOCABULARY) < 20, -torch.inf) if input_ids.shape[1] % 2 == 0 else scores


class InPlace(LogitsProcessor):
    """Writes into its input, as it may."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 7] = -torch.inf
        return scores


PREFIX = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
BIAS = SequenceBiasLogitsProcessor({(9,): 2.0, (10, 11): 5.0})
GREEDY: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "repetition": (SamplingParams(repetition_penalty=1.7), {"repetition_penalty": 1.7}),
    "n-gram": (SamplingParams(no_repeat_ngram=1), {"no_repeat_ngram_size": 1}),
    "min-new": (SamplingParams(min_new_tokens=19), {"min_new_tokens": 19}),
    "together": (
        SamplingParams(repetition_penalty=1.3, no_repeat_ngram=2, min_new_tokens=9),
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9},
    ),
    "prefix": (SamplingParams(processors=(PREFIX,)), {"prefix_allowed_tokens_fn": allowed}),
    "own": (
        SamplingParams(processors=(Alternating(), BIAS)),
        {"logits_processor": LogitsProcessorList([Alternating(), BIAS])},
    ),
}


def speculate(
    pair: Pair, prompts: Sequence[list[int]], policy: Any, settings: Settings, key: int = KEY
) -> list[list[int]]:
    speculator = Speculator(pair, policy, settings)
    return [list(speculator.generate(prompt, key + i).tokens) for i, prompt in enumerate(prompts)]


Texts = Callable[[str], list[list[int]]]
"""Texts by the name of a case: they are the same for every tree, and made once."""


@pytest.fixture(scope="module")
def generated(plain_pair: Pair, prompt_ids: list[list[int]]) -> Texts:
    """What `generate` writes with the options of a case of `GREEDY`, or with none."""

    @functools.cache
    def texts(name: str) -> list[list[int]]:
        options = GREEDY[name][1] if name else {}
        out = []
        for prompt in prompt_ids[1::3]:
            ids = torch.tensor([prompt])
            made = plain_pair.target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options
            )
            out.append(made[0, len(prompt) :].tolist())
        return out

    return texts


@pytest.mark.parametrize(("name", "tree"), on_chain_and_tree(GREEDY))
def test_greedy_text_is_that_of_generate_with_the_same_options(
    pair: Pair, prompt_ids: list[list[int]], generated: Texts, name: str, tree: str | None
) -> None:
    sampling, prompts = GREEDY[name][0], prompt_ids[1::3]
    expected, bare = generated(name), generated("")
    for mode in ("match", "rejection"):
        for policy in (FixedLength(3), Confidence(0.4))[: 1 if mode == "rejection" else 2]:
            settings = Settings(0.0, NEW, tree=tree, sampling=sampling, verification=mode)
            assert speculate(pair, prompts, policy, settings) == expected
    assert sum(a != b for a, b in zip(expected, bare, strict=True)) >= 1, "the option changes the text"


SAMPLED: dict[str, tuple[SamplingParams, Callable[[int], list[LogitsProcessor]]]] = {
    "top-k": (SamplingParams(top_k=4), lambda n: [TopKLogitsWarper(4)]),
    "top-p": (SamplingParams(top_p=0.7), lambda n: [TopPLogitsWarper(0.7)]),
    "min-p": (SamplingParams(min_p=0.2), lambda n: [MinPLogitsWarper(0.2)]),
    "all": (
        SamplingParams(top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, no_repeat_ngram=2, min_new_tokens=9,
                processors=(Alternating(),)),
        lambda n: [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2),
                   MinNewTokensLengthLogitsProcessor(n, 9, [EOS]), Alternating(), TopKLogitsWarper(9),
                   TopPLogitsWarper(0.9), MinPLogitsWarper(0.01)],
    ),
    "prefix": (SamplingParams(processors=(PREFIX,)), lambda n: [PREFIX]),
    "in place": (SamplingParams(processors=(InPlace(),)), lambda n: [InPlace()]),
}  # fmt: skip
WARPERS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def processors_of(name: str, prompt: int, temperature: float) -> LogitsProcessorList:
    """In the order of `generate`: the temperature before the first warper."""
    made = SAMPLED[name][1](prompt)
    first = next((i for i, p in enumerate(made) if isinstance(p, WARPERS)), len(made))
    return LogitsProcessorList([*made[:first], TemperatureLogitsWarper(temperature), *made[first:]])


@torch.no_grad()
def slow_text(pair: Pair, prompt: list[int], key: int, processors: LogitsProcessorList, new: int) -> list[int]:
    """Plain sampling by the keyed noise: no cache, no draft, one row at a time."""
    text = list(prompt)
    while len(text) < len(prompt) + new and text[len(prompt) :][-1:] != [EOS]:
        ids = torch.tensor([text])
        scores = processors(ids, pair.target(ids).logits[:, -1])
        noise = gumbel(key, torch.tensor([len(text)]), pair.vocabulary, torch.float64)
        text.append(int((torch.log_softmax(scores, -1) + noise).argmax()))
    return text[len(prompt) :]


HOT = 1.3


@pytest.fixture(scope="module")
def sampled(plain_pair: Pair, prompt_ids: list[list[int]]) -> Texts:
    """What the plain loop writes with the processors of a case of `SAMPLED`."""

    @functools.cache
    def texts(name: str) -> list[list[int]]:
        made = enumerate(prompt_ids[1::3])
        return [slow_text(plain_pair, ids, KEY + i, processors_of(name, len(ids), HOT), NEW) for i, ids in made]

    return texts


@pytest.fixture(scope="module")
def bare(pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """What is written by the same noise without processors, whatever is drafted."""
    return speculate(pair, prompt_ids[1::3], FixedLength(4), Settings(HOT, NEW, verification="match"))


@pytest.mark.parametrize(("name", "tree"), on_chain_and_tree(SAMPLED))
def test_sampled_text_under_match_is_that_of_a_plain_loop_with_the_same_noise(
    pair: Pair, prompt_ids: list[list[int]], sampled: Texts, bare: list[list[int]], name: str, tree: str | None
) -> None:
    prompts, expected = prompt_ids[1::3], sampled(name)
    settings = Settings(HOT, NEW, tree=tree, sampling=SAMPLED[name][0], verification="match")
    for policy in (FixedLength(4), Confidence(0.3)):
        assert speculate(pair, prompts, policy, settings) == expected
    assert bare != expected, "the processors change the text"


@torch.no_grad()
def banned(pair: Pair, prompt: list[int], text: list[int], processors: LogitsProcessorList) -> int:
    """How many tokens of a text the processors forbid at their place."""
    count = 0
    for at, token in enumerate(text):
        ids = torch.tensor([[*prompt, *text[:at]]])
        count += bool(processors(ids, pair.target(ids).logits[:, -1])[0, token] == -torch.inf)
    return count


@pytest.mark.parametrize(
    ("mode", "tree"),
    [("rejection", None), ("rejection", "4,2"), ("rejection", "parents:-1,-1,0,0,1,2,5"), ("rejection_replace", "4,2"),
     ("block", None)],
)  # fmt: skip
def test_a_forbidden_token_never_appears_under_rejection(
    pair: Pair, plain_pair: Pair, prompt_ids: list[list[int]], mode: str, tree: str | None
) -> None:
    """Among them trees that ask for more candidates than the processors leave."""
    prompts = prompt_ids[2:6:3]
    cases = {**SAMPLED, "top-2": (SamplingParams(top_k=2), lambda n: [TopKLogitsWarper(2)])}
    for name, (sampling, _) in cases.items():
        settings = Settings(1.3, 8, tree=tree, sampling=sampling, verification=mode)
        texts = speculate(pair, prompts, FixedLength(3), settings)
        for prompt, text in zip(prompts, texts, strict=True):
            made = LogitsProcessorList(cases[name][1](len(prompt)))
            processors = processors_of(name, len(prompt), 1.3) if name in SAMPLED else made
            assert banned(plain_pair, prompt, text, processors) == 0
        assert speculate(pair, prompts, FixedLength(3), settings) == texts
        assert speculate(pair, prompts, FixedLength(3), settings, KEY + 7) != texts


def test_the_support_check_can_fail(pair: Pair, plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    text = speculate(pair, prompt_ids[-1:], FixedLength(3), Settings(1.3, 14, verification="match"))[0]
    assert banned(plain_pair, prompt_ids[-1], text, LogitsProcessorList([TopKLogitsWarper(1)])) > 0


def test_warpers_do_not_touch_greedy_text(pair: Pair, prompt_ids: list[list[int]]) -> None:
    bare = speculate(pair, prompt_ids, FixedLength(3), Settings(0.0, NEW))
    sampling = SamplingParams(top_k=3, top_p=0.5, min_p=0.3)
    assert speculate(pair, prompt_ids, FixedLength(3), Settings(0.0, NEW, sampling=sampling)) == bare


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_row_of_a_call_has_its_own_prefix_and_padding(temperature: float) -> None:
    """Prefixes of different lengths in one call, as a tree of alternatives asks for them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)
    prefixes = [[5, 6], [7], [6, 5], [9, 9, 9]]
    sampling = SamplingParams(repetition_penalty=2.0, no_repeat_ngram=2, processors=(PREFIX, Alternating()))
    for padding in ([], [0, 0, 3]):
        sampler = Sampler(sampling.build(temperature, [5], (EOS,), torch.device("cpu")), temperature, padding)
        before = logits.clone()
        together = sampler(logits, lambda: prefixes)
        assert torch.equal(logits, before), "the raw logits are left as they are"
        for row, prefix in enumerate(prefixes):
            chain = sampling.build(temperature, [5], (EOS,), torch.device("cpu"))
            assert torch.equal(
                together[row], chain(torch.tensor([[*padding, *prefix]]), logits[row : row + 1].clone())[0]
            )


def test_without_a_processor_nobody_asks_for_prefixes() -> None:
    sampler = Sampler(LogitsProcessorList(), 0.5)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampler(logits, lambda: pytest.fail("asked")), logits / 0.5)


def test_processors_of_the_library_without_state_are_called_as_they_are() -> None:
    made = [one for one in processors_of("all", 3, 0.7) if not isinstance(one, Alternating)]
    processors = (PREFIX, BIAS, *made)
    assert SamplingParams(processors=processors).checked(VOCABULARY, torch.device("cpu")).processors == processors


@pytest.mark.parametrize(
    ("option", "value"),
    [("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 2.0),
     ("repetition_penalty", 0.0), ("no_repeat_ngram", -2), ("min_new_tokens", -1)],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_option(option: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{option}: expected .*, not {value}"):
        SamplingParams(**{option: value})
