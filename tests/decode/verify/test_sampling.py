"""Sampling options, defaults of a model, and logits processors: the text is that of `generate` with the same ones."""

from __future__ import annotations

import contextlib
import copy
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
from specstop.decode.verify.sampler import Sampler
from specstop.decode.verify.sampling import IGNORED, INERT, NEUTRAL, WARPERS, SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.generation import logits_process as library

CPU = torch.device("cpu")
TREE = "3,2,1"
KEY = 91

GREEDY: dict[str, dict[str, Any]] = {
    "bad_words_ids": {"bad_words_ids": [[7], [9, 10], [20], [30], [40]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(20, 44)]},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0)},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "min_length": {"min_length": 24},
    "min_new_tokens": {"min_new_tokens": 24},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[10, 11], 5.0]]},
    "suppress_tokens": {"suppress_tokens": [*range(20, 34)]},
    "several": {"do_sample": True, "temperature": 0.6, "max_length": 12, "repetition_penalty": 1.3, "top_k": 5},
}
"""Fields of `generation_config` that change greedy text; the last ones are like those of Qwen2.5-Instruct."""

SAMPLED: dict[str, dict[str, Any]] = {
    name: {name: value}
    for name, value in {
        "epsilon_cutoff": 0.03, "eta_cutoff": 0.1, "min_p": 0.2, "top_h": 0.4, "top_k": 4, "top_p": 0.7, "typical_p": 0.6,
    }.items()
}  # fmt: skip
"""Fields that change sampling alone."""


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
    assert options - WARPERS.keys() - {*GREEDY} == {"remove_invalid_values", "renormalize_logits"}
    assert {*SAMPLED} == WARPERS.keys()


@pytest.mark.parametrize(
    "name", ["several", "min_length", "encoder_repetition_penalty", "forced_bos_token_id", "no_repeat_ngram_size"]
)
def test_greedy_text_is_that_of_generate(plain_pair, prompt_ids, name):
    """As defaults of the model, in a chain, a tree, a batch, with a drafter and plain; and as options."""
    fields, prompts = GREEDY[name], prompt_ids[::2]
    with configured(plain_pair, **fields):
        expected = generate(plain_pair, prompts)
        for tree, drafter in ((None, "model"), (TREE, "suffix")):
            texts = decode(plain_pair, prompts, FixedLength(3), settings=Settings(0.0, NEW, tree=tree), drafter=drafter)
            assert [list(text.tokens) for text in texts] == expected
        assert plain_texts(plain_pair, prompts, [0] * len(prompts), NEW).tokens == expected
        bare = Settings(0.0, NEW, sampling=SamplingParams(model_defaults=False))
        assert speculate(plain_pair, prompts, FixedLength(3), bare) != expected, "the field changes the text"
    options = {name.replace("ngram_size", "ngram") if name[0] == "n" else name: v for name, v in fields.items()}
    options = {name: value for name, value in options.items() if name in NEUTRAL}
    settings = Settings(0.0, NEW, sampling=SamplingParams(**options), verification="rejection")
    assert speculate(plain_pair, prompts, FixedLength(3), settings.for_pair(plain_pair)) == expected


@pytest.mark.parametrize("name", [*GREEDY, *SAMPLED])
def test_scores_are_those_of_the_processors_that_generate_builds(plain_pair, prompt_ids, name):
    fields, prompt, processors = (GREEDY | SAMPLED)[name], prompt_ids[4], LogitsProcessorList()

    def record(model: Any, input_ids: Any, logits_processor: Any, **others: Any) -> Any:
        processors.extend(logits_processor)
        return input_ids

    with configured(plain_pair, **fields):
        options = {} if "top_k" in fields else {"top_k": 0}  # not the default of the library
        generate(plain_pair, [prompt], do_sample=True, temperature=0.7, custom_generate=record, **options)
        sampling = Settings(0.7, NEW, verification="match").for_pair(plain_pair).sampling
        if name in SAMPLED:
            greedy = Settings(0.0, NEW).for_pair(plain_pair).sampling
            assert not greedy.build(0.0, prompt, (EOS,), CPU), "greedy decoding ignores it"
    built = sampling.build(0.7, prompt, (EOS,), CPU)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for more in ([], [9], [9, 10, *range(20, 43)]):
        rows = torch.tensor([[*prompt, *more]] * 3)
        assert torch.equal(built(rows, logits.clone()), processors(rows, logits.clone()))


def test_options_override_single_defaults(plain_pair, prompt_ids):
    with configured(plain_pair, **GREEDY["several"], suppress_tokens=[20, 21, 22], typical_p=0.9):
        settings = Settings(0.0, NEW, sampling=SamplingParams(repetition_penalty=1.0, top_k=0, suppress_tokens=[]))
        assert settings.for_pair(plain_pair).sampling.to_dict() == {"typical_p": 0.9}
        expected = generate(plain_pair, prompt_ids[1::3], repetition_penalty=1.0, suppress_tokens=None)
        assert speculate(plain_pair, prompt_ids[1::3], FixedLength(3), settings) == expected
    with configured(plain_pair, min_length=30):  # `generate` measures the shortest text by one of both
        assert Settings(sampling=SamplingParams(min_new_tokens=0)).for_pair(plain_pair).sampling.to_dict() == {}
    with configured(plain_pair, do_sample=True, temperature=0.6, max_length=40):
        sampling = Settings(0.7, 4, verification="match").for_pair(plain_pair).sampling
        assert sampling.to_dict() == {} and not sampling.build(0.7, [3, 4, 5], (EOS,), CPU)


@pytest.mark.parametrize(
    "options",
    [{"top_k": -1}, {"top_k": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": float("nan")}, {"min_p": -0.1},
     {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"no_repeat_ngram": -2}, {"min_new_tokens": -1}, {"min_new_tokens": 1.5},
     {"temperature": 0.7}],
)  # fmt: skip
def test_an_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("fields", "noun"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale"), ({"token_healing": True}, "token_healing"),
        ({"future_field": 3}, "future_field"), ({"suppress_tokens": "all"}, "generation_config"),
        ({"repetition_penalty": -1.0}, "generation_config"), ({"bad_words_ids": [[-1]]}, "generation_config"),
    ],
)  # fmt: skip
def test_a_default_that_cannot_be_applied_is_refused_by_name(plain_pair, prompts, tmp_path, fields, noun, monkeypatch):
    if noun == "future_field":
        original = GenerationConfig.__init__
        monkeypatch.setattr(
            GenerationConfig, "__init__", lambda self, **more: (setattr(self, noun, None), original(self, **more))[1]
        )
    with configured(plain_pair, **fields):
        for call in (
            lambda: decode(plain_pair, "w7 w9", FixedLength(2)),
            lambda: collect(plain_pair, prompts, tmp_path / "t"),
        ):
            with pytest.raises(InputError, match=noun):
                call()
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


def allowed(batch: int, ids: Tensor) -> list[int]:
    """Return tokens with another remainder by 3 than the last one: the answer depends on the prefix."""
    assert batch == 0, "every row is the only text"
    return [token for token in range(VOCABULARY) if token % 3 != int(ids[-1]) % 3]


PREFIX = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_row_of_a_call_has_its_own_prefix_and_padding(temperature):
    """Prefixes of different lengths in one call, as in a tree."""
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prefixes = [[5, 6], [7], [6, 5], [9, 9, 9]]
    sampling = SamplingParams(repetition_penalty=2.0, no_repeat_ngram=2, processors=(PREFIX,))
    for padding in ([], [0, 0, 3]):
        sampler = Sampler(sampling.build(temperature, [5], (EOS,), CPU), temperature, padding)
        before = logits.clone()
        together = sampler(logits, lambda: prefixes)
        assert torch.equal(logits, before), "raw logits are not modified"
        for row, prefix in enumerate(prefixes):
            chain = sampling.build(temperature, [5], (EOS,), CPU)
            alone = chain(torch.tensor([[*padding, *prefix]]), logits[row : row + 1].clone())[0]
            assert torch.equal(together[row], alone)
    bare = Sampler(LogitsProcessorList(), 0.5)
    assert torch.equal(bare(logits, lambda: pytest.fail("no processor needs prefixes")), logits / 0.5)


# Processors with state


class Remembering(LogitsProcessor):
    """Forbids the tokens of the calls before, of the first row."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        out = scores.clone()
        out[:, self.tokens] = -torch.inf
        self.tokens.append(int(input_ids[0, -1]))
        return out


class Sleeping(LogitsProcessor):
    """Has no state before a certain token, like limits of a thinking phase; then it favours other tokens in each call."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.calls >= 0 or int(input_ids[0, -1]) == self.token:
            self.calls += 1
        return scores + (max(self.calls, 0) * torch.arange(scores.shape[1])) % 7


class Allowed:
    """A function of `prefix_allowed_tokens_fn` with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: int, ids: Tensor) -> list[int]:
        self.calls += 1
        return [token for token in range(VOCABULARY) if (token + self.calls) % 4]


STATEFUL: dict[str, Callable[[], LogitsProcessor]] = {
    "remembering": Remembering,
    "sleeping": lambda: Sleeping(18),  # which stands in a text
    "function": lambda: PrefixConstrainedLogitsProcessor(Allowed(), num_beams=1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_follows_every_candidate(plain_pair, prompt_ids, name):
    processor, prompts = STATEFUL[name](), prompt_ids[1:4]
    before = {key: copy.deepcopy(value) for key, value in vars(processor).items()}
    fresh = [generate(plain_pair, [p], logits_processor=LogitsProcessorList([STATEFUL[name]()]))[0] for p in prompts]
    ours = {"custom_generate": specstop_generate, "draft_model": plain_pair.draft, "policy": "fixed:4"}
    sampling = SamplingParams(processors=(processor,))
    for tree in (None, TREE):
        assert (
            generate(plain_pair, prompts, logits_processor=LogitsProcessorList([processor]), tree=tree, **ours) == fresh
        )
        settings = Settings(0.0, NEW, tree=tree, sampling=sampling)
        assert speculate(plain_pair, prompts, FixedLength(4), settings, batch=3) == fresh
    assert plain_texts(plain_pair, prompts, [0] * 3, NEW, sampling=sampling).tokens == fresh
    assert repr(before) == repr(vars(processor)) or name == "function", "copies are called"


class Random(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape)


class Averaging(LogitsProcessor):
    """Depends on the scores of earlier steps, which differ between draft and target."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.mean = (self.mean + scores) / 2
        return self.mean


class Shared(LogitsProcessor):
    """Its copies share a list."""

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


@pytest.mark.parametrize("kind", [Random, Averaging, Shared, Locked])
def test_a_processor_that_candidates_cannot_follow_is_refused_by_name(pair, kind):
    with pytest.raises(InputError, match=f"logits processor {kind.__name__} "):
        Speculator(pair, FixedLength(2), Settings(0.7, 4, sampling=SamplingParams(processors=(kind(),))))
    guidance = library.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, pair.target)
    with pytest.raises(InputError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor"):
        SamplingParams(processors=(guidance,)).checked(VOCABULARY, CPU)


def test_rows_of_a_batch_have_their_own_processors(plain_pair, prompt_ids):
    """Options that read the prompt are split by row; a processor that treats rows differently is refused."""
    ids = torch.tensor([prompt[:3] for prompt in prompt_ids[3:6]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    ours = {"custom_generate": specstop_generate, "draft_model": plain_pair.draft}
    for more in ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}):
        expected = plain_pair.target.generate(ids, **options, **more).tolist()
        for tree in (None, TREE):
            assert plain_pair.target.generate(ids, tree=tree, **ours, **options, **more).tolist() == expected
    options["logits_processor"] = LogitsProcessorList([Remembering()])
    with pytest.raises(InputError, match=r"Remembering .*rows of a batch"):
        plain_pair.target.generate(ids, **ours, **options)
