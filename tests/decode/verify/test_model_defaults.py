"""Sampling defaults of a model: each field of `generation_config` is applied as `generate` applies it, or refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, NEW, VOCABULARY
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.benchmark import bench
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import IGNORED, INERT, NEUTRAL, WARPERS, SamplingParams
from specstop.policies.errors import InputError, SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import Conditions
from transformers import GenerationConfig

GREEDY: dict[str, Any] = {
    "bad_words_ids": [[7], [9, 10], [20], [30], [40]],
    "begin_suppress_tokens": [*range(20, 44)],
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 0.3,
    "exponential_decay_length_penalty": (2, 3.0),
    "forced_bos_token_id": 9,
    "forced_eos_token_id": EOS,
    "min_length": 24,
    "min_new_tokens": 24,
    "no_repeat_ngram_size": 1,
    "repetition_penalty": 1.7,
    "sequence_bias": [[[9], 4.0], [[10, 11], 5.0]],
    "suppress_tokens": [*range(20, 34)],
}
"""Each field that changes greedy text."""

SAMPLED: dict[str, Any] = {
    "epsilon_cutoff": 0.03,
    "eta_cutoff": 0.1,
    "min_p": 0.2,
    "top_h": 0.4,
    "top_k": 4,
    "top_p": 0.7,
    "typical_p": 0.6,
}
"""Each field that changes sampling alone."""

BOTH = {"do_sample": True, "temperature": 0.6, "max_length": 12, "repetition_penalty": 1.3, "top_k": 5}
"""Of Qwen2.5-Instruct's kind."""


@contextlib.contextmanager
def configured(pair: Pair, **fields: Any) -> Iterator[Pair]:
    """Yield the pair whose target has these defaults."""
    target: Any = pair.target
    kept = target.generation_config
    target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    for name, value in fields.items():
        setattr(target.generation_config, name, value)
    try:
        yield pair
    finally:
        target.generation_config = kept


def generated(pair: Pair, prompts: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, **options
        )
        texts.append(made[0, len(prompt) :].tolist())
    return texts


def decoded(pair: Pair, prompts: list[list[int]], settings: Settings, drafter: str = "model") -> list[list[int]]:
    return [list(text.tokens) for text in decode(pair, prompts, FixedLength(3), settings=settings, drafter=drafter)]


def test_every_field_of_the_installed_transformers_is_classified() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    refused = {"constraints", "force_words_ids", "guidance_scale", "token_healing", "watermarking_config"}
    options = {*NEUTRAL, "no_repeat_ngram_size"} - {"no_repeat_ngram"}
    assert fields <= {*options, *IGNORED, *INERT, *refused} and not options & {*INERT, *refused}
    assert options - WARPERS.keys() - {*GREEDY} == {"remove_invalid_values", "renormalize_logits"}, "no other text"
    assert {*SAMPLED} == WARPERS.keys()


@pytest.mark.parametrize("tree", [None, "3,2,1"])
@pytest.mark.parametrize("name", [*GREEDY, "together"])
def test_greedy_text_is_that_of_generate(
    plain_pair: Pair, prompt_ids: list[list[int]], name: str, tree: str | None
) -> None:
    prompts = prompt_ids
    fields = BOTH if name == "together" else {name: GREEDY[name]}
    with configured(plain_pair, **fields):
        expected = generated(plain_pair, prompts)
        for drafter in ("model", "suffix") if tree is None else ("model",):
            assert decoded(plain_pair, prompts, Settings(0.0, NEW, tree=tree), drafter) == expected
        bare = decoded(plain_pair, prompts, Settings(0.0, NEW, sampling=SamplingParams(model_defaults=False)))
        keys = [0] * len(prompts)
        assert plain_texts(plain_pair, prompts, keys, NEW).tokens == expected, "side by side"
    assert bare != expected, "the field changes the text"


@pytest.mark.parametrize("name", [*GREEDY, *SAMPLED, "together"])
def test_sampling_is_from_what_the_librarys_processors_leave(
    plain_pair: Pair, prompt_ids: list[list[int]], name: str
) -> None:
    """The processors that `generate` builds, taken from it, and those of a run give the same scores."""
    fields = BOTH if name == "together" else {name: (GREEDY | SAMPLED)[name]}
    prompt, handed = prompt_ids[4], []

    def take(model: Any, input_ids: Any, logits_processor: Any, **others: Any) -> Any:
        handed.extend(logits_processor)
        return input_ids

    with configured(plain_pair, **fields):
        options = {"top_k": 0} if "top_k" not in fields else {}  # not the library's own default
        ids = torch.tensor([prompt])
        plain_pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.7, max_new_tokens=NEW,
            custom_generate=take, **options,
        )  # fmt: skip
        sampling = Settings(0.7, NEW, verification="match").for_pair(plain_pair).sampling
    made = sampling.build(0.7, prompt, (EOS,), torch.device("cpu"))
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for more in ([], [9], [9, 10, *range(20, 43)]):
        expected, actual = logits.clone(), logits.clone()
        rows = torch.tensor([[*prompt, *more]] * 3)
        for processor in handed:
            expected = processor(rows, expected)
        for processor in made:
            actual = processor(rows, actual)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", SAMPLED)
def test_greedy_decoding_leaves_the_fields_of_sampling_aside(
    plain_pair: Pair, prompt_ids: list[list[int]], name: str
) -> None:
    with configured(plain_pair, **{name: SAMPLED[name], "do_sample": True}):
        speculator = Speculator(plain_pair, FixedLength(2), Settings(0.0, 4))
        assert not speculator.settings.sampling.build(0.0, [3], (EOS,), torch.device("cpu")), "and nothing is slower"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_defaults_no_processor_is_built(plain_pair: Pair, temperature: float) -> None:
    with configured(plain_pair, do_sample=True, temperature=0.6, max_length=40):
        sampling = Settings(temperature, 4, verification="match").for_pair(plain_pair).sampling
    assert sampling.to_dict() == {} and not sampling.build(temperature, [3, 4, 5], (EOS,), torch.device("cpu"))


def test_options_override_single_fields(plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts, defaults = prompt_ids[1::3], {**BOTH, "suppress_tokens": [20, 21, 22], "typical_p": 0.9}
    with configured(plain_pair, **defaults):
        own = SamplingParams(repetition_penalty=1.0, top_k=0, suppress_tokens=[])
        settings = Settings(0.0, NEW, sampling=own)
        assert settings.for_pair(plain_pair).sampling.to_dict() == {"typical_p": 0.9}
        assert decoded(plain_pair, prompts, settings) == generated(
            plain_pair, prompts, repetition_penalty=1.0, suppress_tokens=None
        )
    with configured(plain_pair, min_length=30):
        none = Settings(sampling=SamplingParams(min_new_tokens=0)).for_pair(plain_pair).sampling
        assert none.to_dict() == {}, "`generate` measures the shortest text by one of both"
    with pytest.raises(InputError, match="temperature"):
        SamplingParams(temperature=0.7)


@pytest.mark.parametrize(("name", "value"), [("guidance_scale", 1.5), ("token_healing", True), ("some_new_field", 3)])
def test_what_cannot_be_applied_is_refused_by_name(
    plain_pair: Pair, prompts: list[Prompt], tmp_path: Path, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "some_new_field":  # of a transformers to come
        monkeypatch.setattr(GenerationConfig, "__init__", with_field(name))
    with configured(plain_pair, **{name: value}):
        with pytest.raises(InputError, match=f"generation_config sets {name}={value}.*model_defaults=False"):
            decode(plain_pair, "w7 w9", FixedLength(2))
        with pytest.raises(InputError, match=name):
            collect(plain_pair, prompts, tmp_path / "t")
        decode(
            plain_pair,
            "w7 w9",
            FixedLength(2),
            settings=Settings(0.0, 2, sampling=SamplingParams(model_defaults=False)),
        )


def with_field(name: str) -> Any:
    before = GenerationConfig.__init__

    def begin(self: Any, **fields: Any) -> None:
        before(self, **fields)
        if name not in vars(self):
            setattr(self, name, None)

    return begin


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("penalty_alpha", 0.6), ("stop_strings", ["w9"])])
def test_another_way_of_decoding_is_left_out_with_a_warning(plain_pair: Pair, name: str, value: Any) -> None:
    with configured(plain_pair, **{name: value}), pytest.warns(SpecstopWarning, match=f"{name}="):
        decode(plain_pair, "w7 w9", FixedLength(2), settings=Settings(0.0, 2))


def test_a_value_that_transformers_refuses_names_the_file(plain_pair: Pair) -> None:
    for fields in ({"suppress_tokens": "all"}, {"repetition_penalty": -1.0}, {"bad_words_ids": [[-1]]}):
        with configured(plain_pair, **fields), pytest.raises(InputError, match="generation_config"):
            decode(plain_pair, "w7 w9", FixedLength(2))


@pytest.mark.parametrize("collector", ["dense", "live", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_collected_rows_are_of_the_text_with_the_defaults(
    plain_pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path, collector: str,
    temperature: float,
) -> None:  # fmt: skip
    pair = dataclasses.replace(plain_pair, drafter="suffix") if collector == "suffix" else plain_pair
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 12, "verification": "match", "shards": 1}
    options |= {"collector": "live"} if collector == "live" else {}
    fields = {**BOTH, "encoder_no_repeat_ngram_size": 2, "suppress_tokens": [20, 21]}
    with configured(plain_pair, **fields):
        trace = collect(pair, prompts, tmp_path / "t", depth=2, **options)
        keys = [stream_key(0, prompt.id) for prompt in prompts]
        texts = plain_texts(plain_pair, prompt_ids, keys, 12, temperature).tokens
    facts = {"repetition_penalty": 1.3, "top_k": 5, "encoder_no_repeat_ngram_size": 2, "suppress_tokens": [20, 21]}
    assert trace.header.sampling == facts
    lengths = {row["prompt_id"]: row["text_tokens"] for row in trace.table(["prompt_id", "text_tokens"]).to_pylist()}
    assert lengths == {p.id: len(t) for p, t in zip(prompts, texts, strict=True) if p.id in lengths}
    rows = trace.table(["prompt_id", "anchor", "tokens", "accepted", "observed"]).to_pylist()
    written = {prompt.id: text for prompt, text in zip(prompts, texts, strict=True)}
    checked = 0
    for row in rows:
        text = written[row["prompt_id"]]
        if row["observed"][0] and row["anchor"] < len(text) and (collector != "live" or row["accepted"][0]):
            assert row["accepted"][0] == (row["tokens"][0] == text[row["anchor"]])
            checked += 1
    assert checked > 5
    with pytest.raises(TraceError, match="sampling"):  # resumed without the model's defaults
        collect(pair, prompts, tmp_path / "t", depth=2, resume=True, **options)


def test_bench_profile_and_facts_have_the_effective_values(plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    with configured(plain_pair, repetition_penalty=1.7, typical_p=0.9):
        lines = bench(plain_pair, prompt_ids[2:5], ["fixed:2"], settings=Settings(0.0, 12), library=plain_pair)
        assert len(lines) > 4 and all(line.same_text == 3 for line in lines)
        profile = measure_profile(plain_pair, prompt_ids[4:], depth=2, new_tokens=8, effort=Effort(repetitions=1))
    assert profile.sampling == {"repetition_penalty": 1.7, "typical_p": 0.9}
    assert SamplingParams.from_dict(profile.sampling).to_dict() == profile.sampling
    assert Conditions(0.0, profile.sampling).sampling == profile.sampling


def test_generate_applies_the_defaults_once(plain_pair: Pair, prompt_ids: list[list[int]]) -> None:
    ids = torch.tensor([prompt_ids[5]])
    with configured(plain_pair, repetition_penalty=1.3, suppress_tokens=[20, 21], sequence_bias=[[[9], 3.0]]):
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        expected = plain_pair.target.generate(ids, **options)
        made = plain_pair.target.generate(
            ids, custom_generate=specstop_generate, draft_model=plain_pair.draft, **options
        )
    assert torch.equal(made, expected)
