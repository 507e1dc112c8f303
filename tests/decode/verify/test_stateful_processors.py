"""Logits processors with state: followed on copies along every candidate, or refused by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

CPU = torch.device("cpu")


class Counting(LogitsProcessor):
    """Favours other tokens in each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + (self.calls * torch.arange(scores.shape[1])) % 7


class Remembering(LogitsProcessor):
    """Forbids the tokens that it saw in the calls before."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        out = scores.clone()
        out[:, self.seen] = -torch.inf
        self.seen.append(int(input_ids[0, -1]))
        return out


class Strict(LogitsProcessor):
    """Asserts that each token is one that it allowed, as matchers of grammars do; knows where the text began."""

    def __init__(self) -> None:
        self.start, self.allowed = 0, set(range(VOCABULARY))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.start = self.start or input_ids.shape[1]
        if input_ids.shape[1] > self.start:
            assert int(input_ids[0, -1]) in self.allowed
        left = (input_ids.shape[1] - self.start) % 3
        self.allowed = {token for token in range(VOCABULARY) if token % 3 == left or token == EOS}
        return scores.masked_fill(torch.tensor([t not in self.allowed for t in range(VOCABULARY)]), -torch.inf)


class Budget(LogitsProcessor):
    """Ends the text after so many calls; until then it does nothing."""

    def __init__(self) -> None:
        self.left = 11

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        return scores if self.left else scores.masked_fill(torch.arange(VOCABULARY) != EOS, -torch.inf)


class Allowed:
    """A function of `prefix_allowed_tokens_fn` that remembers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: int, ids: Tensor) -> list[int]:
        self.calls += 1
        return [token for token in range(VOCABULARY) if (token + self.calls) % 4]


def watermark() -> LogitsProcessor:
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device=CPU
    )


RESTARTABLE: dict[str, Callable[[], LogitsProcessor]] = {
    "counting": Counting,
    "remembering": Remembering,
    "strict": Strict,
    "budget": Budget,
    "function with state": lambda: PrefixConstrainedLogitsProcessor(Allowed(), num_beams=1),
    "SynthID": watermark,
}


@pytest.mark.parametrize("name", RESTARTABLE)
@pytest.mark.parametrize("tree", [None, "3,2,1"])
def test_state_that_depends_on_the_tokens_follows_every_candidate(
    plain_pair: Pair, prompt_ids: list[list[int]], name: str, tree: str | None
) -> None:
    processor = RESTARTABLE[name]()
    before = {key: copy.deepcopy(value) for key, value in vars(processor).items()}
    prompts = prompt_ids[1:4]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options: Any = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        fresh = LogitsProcessorList([RESTARTABLE[name]()])
        text = plain_pair.target.generate(ids, logits_processor=fresh, **options)[0]
        made = plain_pair.target.generate(
            ids, logits_processor=LogitsProcessorList([processor]), custom_generate=specstop_generate,
            draft_model=plain_pair.draft, policy="fixed:4", tree=tree, **options,
        )  # fmt: skip
        assert made[0].tolist() == text.tolist()
        expected.append(text[len(prompt) :].tolist())
    settings = Settings(0.0, NEW, tree=tree, sampling=SamplingParams(processors=(processor,)))
    texts = Speculator(plain_pair, FixedLength(4), settings, batch=3).run([Request(prompt) for prompt in prompts])
    assert [list(text.tokens) for text in texts] == expected
    plain = plain_texts(plain_pair, prompts, [0] * 3, NEW, sampling=settings.sampling)
    assert plain.tokens == expected
    # It was called on copies.
    assert repr(before) == repr(vars(processor)) or name == "function with state"


class Sleeping(LogitsProcessor):
    """Has no state before some token has come, as limits of a thinking phase; then it favours other tokens in each call."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.calls >= 0 or int(input_ids[0, -1]) == self.token:
            self.calls += 1
        return scores + (max(self.calls, 0) * torch.arange(scores.shape[1])) % 7


@pytest.mark.parametrize("drafting", [{"tree": None}, {"tree": "3,2,1"}, {"drafter": "lookup"}])
def test_state_that_begins_in_the_middle_of_a_text_follows_every_candidate(
    plain_pair: Pair, prompt_ids: list[list[int]], drafting: dict[str, Any]
) -> None:
    ids = torch.tensor([prompt_ids[3]])
    options: Any = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    own = {"custom_generate": specstop_generate, "policy": "fixed:4", **drafting}
    own |= {} if "drafter" in drafting else {"draft_model": plain_pair.draft}
    text = plain_pair.target.generate(ids, **options)[0, len(prompt_ids[3]) :].tolist()
    for token in text[:6]:
        expected, made = (
            plain_pair.target.generate(ids, logits_processor=LogitsProcessorList([Sleeping(token)]), **options, **more)
            for more in ({}, own)
        )
        assert made.tolist() == expected.tolist(), token


def test_state_that_begins_in_the_middle_of_a_text_is_that_of_its_row(
    plain_pair: Pair, prompt_ids: list[list[int]]
) -> None:
    ids = torch.tensor([prompt_ids[3][:3], prompt_ids[4][:3]])
    options: Any = {"do_sample": False, "max_new_tokens": NEW}
    woken = int(plain_pair.target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 5])
    options["logits_processor"] = LogitsProcessorList([Sleeping(woken)])
    made = plain_pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=specstop_generate,
        draft_model=plain_pair.draft,
        **options,
    )
    for row, prompt in zip(made, ids, strict=True):
        options["logits_processor"] = LogitsProcessorList([Sleeping(woken)])
        alone = plain_pair.target.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)[0]
        assert row[: len(alone)].tolist() == alone.tolist()


class Random(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape)


class Averaging(LogitsProcessor):
    """Depends on the scores of earlier steps, of which draft and target have different ones."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.mean = (self.mean + scores) / 2
        return self.mean


class Shared(LogitsProcessor):
    """Its copies have one list."""

    calls: list[int] = []  # noqa: RUF012

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(0)
        return scores + (len(self.calls) * torch.arange(scores.shape[1])) % 7


class Locked(LogitsProcessor):
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize(
    ("kind", "why"), [(Random, "random numbers"), (Averaging, "earlier scores"), (Shared, "share"), (Locked, "copied")]
)
def test_what_candidates_cannot_follow_is_refused_by_name(pair: Pair, kind: type[LogitsProcessor], why: str) -> None:
    settings = Settings(0.7, 4, sampling=SamplingParams(processors=(kind(),)))
    with pytest.raises(InputError, match=f"logits processor {kind.__name__} .*{why}") as error:
        Speculator(pair, FixedLength(2), settings)
    assert "\n" not in str(error.value)


def test_one_that_runs_the_target_is_refused_by_name(pair: Pair) -> None:
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, pair.target)
    with pytest.raises(InputError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor"):
        SamplingParams(processors=(guidance,)).checked(VOCABULARY, CPU)


def test_rows_of_a_batch_that_are_treated_differently_are_refused(
    plain_pair: Pair, prompt_ids: list[list[int]]
) -> None:
    """`Remembering` looks at the first row of a batch alone."""
    ids = torch.tensor([prompt_ids[3][:3], prompt_ids[4][:3]])
    with pytest.raises(InputError, match=r"Remembering .*rows of a batch"):
        plain_pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4,
            logits_processor=LogitsProcessorList([Remembering()]), custom_generate=specstop_generate,
            draft_model=plain_pair.draft,
        )  # fmt: skip


@pytest.mark.parametrize("options", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}])
def test_processors_that_hold_the_prompts_of_a_batch_are_dealt_to_its_rows(
    plain_pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any]
) -> None:
    ids = torch.tensor([prompt[:3] for prompt in prompt_ids[3:6]])
    options = {**options, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    expected = plain_pair.target.generate(ids, **options)
    for tree in (None, "3,2,1"):
        made = plain_pair.target.generate(
            ids, custom_generate=specstop_generate, draft_model=plain_pair.draft, tree=tree, **options
        )
        assert made.tolist() == expected.tolist()
