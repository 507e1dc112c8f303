"""Sampling options, defaults of a model, and logits processors: the text is that of `generate` with the same ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.collect.run import collect
from specstop.decode.benchmark import bench
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.sampling import IGNORED, INERT, NEUTRAL, WARPERS, SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

CPU = torch.device("cpu")
TREE = "3,2,1"
KEY = 91

FIELDS: dict[str, Any] = {
    "bad_words_ids": [[7], [9, 10], [20], [30], [40]], "begin_suppress_tokens": [*range(20, 44)],
    "encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 0.3, "epsilon_cutoff": 0.03, "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": (2, 3.0), "forced_bos_token_id": 9, "forced_eos_token_id": EOS, "min_length": 24,
    "min_new_tokens": 24, "min_p": 0.2, "no_repeat_ngram_size": 1, "repetition_penalty": 1.7,
    "sequence_bias": [[[9], 4.0], [[10, 11], 5.0]], "suppress_tokens": [*range(20, 34)], "top_h": 0.4, "top_k": 4,
    "top_p": 0.7, "typical_p": 0.6,
}  # fmt: skip
"""Fields of `generation_config` with values that change texts."""


@contextlib.contextmanager
def configured(pair: Pair, **fields: Any) -> Iterator[Pair]:
    """Yield the pair whose target has these defaults."""
    target: Any = pair.target
    before = target.generation_config
    target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    for name, value in fields.items():
        setattr(target.generation_config, name, value)
    try:
        yield pair
    finally:
        target.generation_config = before


def generate(pair: Pair, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """Return what the target's `generate` adds to each prompt."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        defaults = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        texts.append(pair.target.generate(ids, **{**defaults, **options})[0, len(prompt) :].tolist())
    return texts


def speculate(
    pair: Pair, prompts: Sequence[list[int]], policy: Any, settings: Settings, key: int = KEY, **more: Any
) -> Any:
    requests = [Request(prompt, key + i) for i, prompt in enumerate(prompts)]
    return [list(text.tokens) for text in Speculator(pair, policy, settings, **more).run(requests)]


# Options and defaults


def test_every_field_of_the_installed_transformers_is_classified():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    refused = {"constraints", "force_words_ids", "guidance_scale", "token_healing", "watermarking_config"}
    options = {*NEUTRAL, "no_repeat_ngram_size"} - {"no_repeat_ngram"}
    assert fields <= {*options, *IGNORED, *INERT, *refused} and not options & {*INERT, *refused}
    assert options - FIELDS.keys() == {"remove_invalid_values", "renormalize_logits"}


@pytest.mark.parametrize("name", FIELDS)
def test_scores_are_those_of_the_processors_that_generate_builds(plain_pair, prompt_ids, name):
    prompt, processors = prompt_ids[4], LogitsProcessorList()

    def record(model: Any, input_ids: Any, logits_processor: Any, **others: Any) -> Any:
        processors.extend(logits_processor)
        return input_ids

    with configured(plain_pair, **{name: FIELDS[name]}):
        options = {} if name == "top_k" else {"top_k": 0}  # not the default of the library
        generate(plain_pair, [prompt], do_sample=True, temperature=0.7, custom_generate=record, **options)
        sampling = Settings(0.7, NEW, verification="match").for_pair(plain_pair).sampling
        if name in WARPERS:
            greedy = Settings(0.0, NEW).for_pair(plain_pair).sampling
            assert not greedy.build(0.0, prompt, (EOS,), CPU), "greedy decoding ignores it"
    built = sampling.build(0.7, prompt, (EOS,), CPU)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for more in ([], [9], [9, 10, *range(20, 43)]):
        rows = torch.tensor([[*prompt, *more]] * 3)
        assert torch.equal(built(rows, logits.clone()), processors(rows, logits.clone()))


def test_options_override_single_defaults(plain_pair, prompt_ids):
    several = {"repetition_penalty": 1.3, "top_k": 5, "max_length": 12, "do_sample": True}  # as of Qwen2.5-Instruct
    with configured(plain_pair, **several, suppress_tokens=[20, 21, 22], typical_p=0.9):
        settings = Settings(0.0, NEW, sampling=SamplingParams(repetition_penalty=1.0, top_k=0, suppress_tokens=[]))
        assert settings.for_pair(plain_pair).sampling.to_dict() == {"typical_p": 0.9}
        expected = generate(plain_pair, prompt_ids[1::3], repetition_penalty=1.0, suppress_tokens=None)
        assert speculate(plain_pair, prompt_ids[1::3], FixedLength(3), settings) == expected
    with configured(plain_pair, min_length=30):  # `generate` measures the shortest text by one of both
        assert Settings(sampling=SamplingParams(min_new_tokens=0)).for_pair(plain_pair).sampling.to_dict() == {}
    with configured(plain_pair, do_sample=True, temperature=0.6, max_length=40):
        sampling = Settings(0.7, 4, verification="match").for_pair(plain_pair).sampling
        assert sampling.to_dict() == {} and not sampling.build(0.7, [3, 4, 5], (EOS,), CPU)
    settings = Settings(0.0, NEW, sampling=SamplingParams(model_defaults=False, forced_eos_token_id=7), ignore_eos=True)
    assert [text[-1] for text in speculate(plain_pair, prompt_ids[1::3], FixedLength(3), settings)] == [7, 7, 7]
    resolved = settings.for_pair(plain_pair).sampling  # dense collection decodes beyond the limit of the text
    longer = plain_texts(plain_pair, prompt_ids[1:2], [KEY], NEW + 3, ignore_eos=True, sampling=resolved).tokens[0]
    assert longer[NEW - 1] == 7 and longer[NEW + 2] != 7


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.0}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"no_repeat_ngram": -2}, {"min_new_tokens": 1.5},
     {"temperature": 0.7}],
)  # fmt: skip
def test_an_invalid_option_is_refused_by_name(options):
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("fields", "noun"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale"), ({"token_healing": True}, "token_healing"),
        ({"suppress_tokens": "all"}, "generation_config"), ({"repetition_penalty": -1.0}, "generation_config"),
        ({"bad_words_ids": [[-1]]}, "generation_config"),
    ],
)  # fmt: skip
def test_a_default_that_cannot_be_applied_is_refused_by_name(plain_pair, fields, noun):
    with configured(plain_pair, **fields):
        with pytest.raises(InputError, match=noun):
            decode(plain_pair, "w7 w9", FixedLength(2))
        without = Settings(0.0, 2, sampling=SamplingParams(model_defaults=False))
        decode(plain_pair, "w7 w9", FixedLength(2), settings=without)


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("penalty_alpha", 0.6), ("stop_strings", ["w9"])])
def test_another_decoding_method_is_ignored_with_a_warning(plain_pair, name, value):
    with configured(plain_pair, **{name: value}), pytest.warns(SpecstopWarning, match=name):
        decode(plain_pair, "w7 w9", FixedLength(2), settings=Settings(0.0, 2))


def test_collect_bench_profile_and_generate_apply_the_defaults_once(plain_pair, prompts, prompt_ids, tmp_path):
    with configured(plain_pair, repetition_penalty=1.7, typical_p=0.9):
        options = {"temperature": 0.7, "max_new_tokens": 8, "depth": 2, "shards": 1}
        trace = collect(plain_pair, prompts[:3], tmp_path / "t", **options)
        lines = bench(plain_pair, prompt_ids[2:5], ["fixed:2"], settings=Settings(0.0, 12), library=plain_pair)
        assert len(lines) > 4 and all(line.same_text == 3 for line in lines)
        profile = measure_profile(plain_pair, prompt_ids[4:], depth=2, new_tokens=8, effort=Effort(repetitions=1))
        ours = {"custom_generate": specstop_generate, "draft_model": plain_pair.draft}
        assert generate(plain_pair, prompt_ids[5:6], **ours) == generate(plain_pair, prompt_ids[5:6])
    assert profile.sampling == SamplingParams.from_dict(profile.sampling).to_dict()
    assert profile.sampling == trace.header.sampling == {"repetition_penalty": 1.7, "typical_p": 0.9}
    with pytest.raises(TraceError, match="sampling"):  # resumed without the defaults of the model
        collect(plain_pair, prompts[:3], tmp_path / "t", resume=True, **options)


# Logits processors


# Processors with state


def favour(count: int, scores: Tensor) -> Tensor:
    """Return scores that favour other tokens for each `count`."""
    return scores + (count * torch.arange(scores.shape[1])) % 7


class Counting(LogitsProcessor):
    """Depends on the number of calls since a token; before it there is no state, as in limits of a thinking phase."""

    def __init__(self, token: int | None = None) -> None:
        self.token, self.calls = token, -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.calls >= 0 or self.token in (None, int(input_ids[0, -1])):
            self.calls += 1
        return favour(max(self.calls, 0), scores)


class Allowed:
    """A function of `prefix_allowed_tokens_fn` with state."""

    calls = 0

    def __call__(self, batch: int, ids: Tensor) -> list[int]:
        self.calls += 1
        return [token for token in range(VOCABULARY) if (token + self.calls) % 4]


class Matcher:
    """Stands for an object of xgrammar, whose state only `fork` copies."""

    __module__ = "xgrammar.matcher"

    def __init__(self, calls: int = 0) -> None:
        self.calls, self.lock = calls, threading.Lock()

    def fork(self) -> Matcher:
        return Matcher(self.calls)


class Matching(LogitsProcessor):
    """Calls a matcher."""

    def __init__(self) -> None:
        self.matcher = Matcher()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.matcher.calls += 1
        return favour(self.matcher.calls, scores)


STATEFUL: dict[str, Callable[[], LogitsProcessor]] = {
    "counting": Counting,
    "matcher": Matching,
    "counting from a token": lambda: Counting(18),  # which occurs in a text
    "function": lambda: PrefixConstrainedLogitsProcessor(Allowed(), num_beams=1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_follows_every_candidate(plain_pair, prompt_ids, name):
    """The processor of the caller is not changed, so that it can be used again."""
    processor, prompts = STATEFUL[name](), prompt_ids[1:4]
    fresh = [generate(plain_pair, [p], logits_processor=LogitsProcessorList([STATEFUL[name]()]))[0] for p in prompts]
    processors = LogitsProcessorList([processor])
    ours = {"custom_generate": specstop_generate, "draft_model": plain_pair.draft, "policy": "fixed:4"}
    sampling = SamplingParams(processors=(processor,))
    for tree in (None, TREE):
        assert generate(plain_pair, prompts, logits_processor=processors, tree=tree, **ours) == fresh
        settings = Settings(0.0, NEW, tree=tree, sampling=sampling)
        assert speculate(plain_pair, prompts, FixedLength(4), settings, batch=3) == fresh
    assert plain_texts(plain_pair, prompts, [0] * 3, NEW, sampling=sampling).tokens == fresh


def average(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Depend on the scores of earlier steps, which differ between draft and target."""
    self.mean = (getattr(self, "mean", 0.0) + scores) / 2
    return self.mean


def share(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Keep the state in the class, so that copies share it."""
    self.calls.append(0)
    return favour(len(self.calls), scores)


def add_lock(self: Any) -> None:
    """Make copies impossible."""
    self.lock = threading.Lock()


REFUSED: dict[str, dict[str, Any]] = {
    "Random": {"__call__": lambda self, input_ids, scores: scores + torch.rand(scores.shape)},
    "Averaging": {"__call__": average},
    "Shared": {"__call__": share, "calls": []},
    "Locked": {"__call__": lambda self, input_ids, scores: scores, "__init__": add_lock},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_processor_that_candidates_cannot_follow_is_refused_by_name(pair, name):
    processor = type(name, (LogitsProcessor,), REFUSED[name])()
    with pytest.raises(InputError, match=f"logits processor {name} "):
        Speculator(pair, FixedLength(2), Settings(0.7, 4, sampling=SamplingParams(processors=(processor,))))
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, pair.target)
    with pytest.raises(InputError, match="guidance_scale"):
        SamplingParams(processors=(guidance,)).checked(VOCABULARY, CPU)


class FirstRow(LogitsProcessor):
    """Treats all rows as the first one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return favour(int(input_ids[0, -1]), scores)


def test_rows_of_a_batch_have_their_own_processors(plain_pair, prompt_ids):
    """Options that read the prompt are split by row; a processor that treats rows differently is refused."""
    ids = torch.tensor([prompt[:3] for prompt in prompt_ids[3:6]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    ours = {"custom_generate": specstop_generate, "draft_model": plain_pair.draft}
    for more in ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}):
        expected = plain_pair.target.generate(ids, **options, **more).tolist()
        for tree in (None, TREE):
            assert plain_pair.target.generate(ids, tree=tree, **ours, **options, **more).tolist() == expected
    options["logits_processor"] = LogitsProcessorList([FirstRow()])
    with pytest.raises(InputError, match=r"FirstRow .*rows of a batch"):
        plain_pair.target.generate(ids, **ours, **options)
