"""What the functions are given: a text is one prompt, a policy has a name, and settings say at once what is wrong."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from specstop.collect.prompts import Prompt
from specstop.collect.run import CollectOptions, collect
from specstop.collect.store import Trace
from specstop.decode.benchmark import bench
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.profile import measure_profile
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, PairError, PolicyError, SpecstopWarning, TraceError
from specstop.policies.features import check_hidden
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import trace_arrays
from transformers import MinLengthLogitsProcessor
from typer.main import get_command

ODD = [
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ({"max_depth": -1}, "max_depth"),
    ({"max_depth": 10**9}, "max_depth"),
    ({"fallback": -1}, "fallback"),
    ({"verification": "macth"}, "verification"),
    ({"tree": "2,x"}, "tree"),
    ({"tree": ""}, "tree"),
    ({"drift": "on"}, "drift"),
    ({"stops": ("w9",)}, "stops"),
    ({"sampling": None}, "sampling"),
]


@pytest.mark.parametrize(("options", "name"), ODD)
def test_settings_are_validated_at_construction(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name) as caught:
        Settings(**options)
    assert "--" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("processors", [(1,), MinLengthLogitsProcessor(2, 0)])
def test_processors_are_validated_at_construction(processors: Any) -> None:
    with pytest.raises(InputError, match="processors"):
        Settings(sampling=SamplingParams(processors=processors))


@pytest.mark.parametrize(
    "options",
    [{"top_p": 2}, {"top_p": 0}, {"top_k": -1}, {"min_p": 5}, {"repetition_penalty": 0}, {"no_repeat_ngram": -1},
     {"min_new_tokens": 1.5}, {"top_k": float("nan")}],
)  # fmt: skip
def test_a_sampling_names_its_parameter(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=name) as caught:
        SamplingParams(**options)
    assert "--" not in str(caught.value)


def test_a_text_is_one_prompt(pair: Pair, prompts: list[Prompt]) -> None:
    settings = Settings(0.0, 8)
    text = prompts[5].text
    one = decode(pair, text, FixedLength(3), settings=settings)
    assert decode(pair, [text], FixedLength(3), settings=settings)[0].tokens == one.tokens
    assert decode(pair, text, FixedLength(3), settings=settings, ids="a").tokens == one.tokens
    assert decode(pair, prompts[5:6], FixedLength(3), settings=settings)[0].tokens == one.tokens
    odd: list[Any] = [
        [7, 8, 9],
        np.array([7, 8]),
        torch.tensor([7, 8]),
        text.encode(),
        [text.encode()],
        Path("a"),
        None,
    ]
    for value in odd:
        with pytest.raises(InputError, match="prompts: expected texts or lists of token ids, not "):
            decode(pair, value, FixedLength(3), settings=settings)
    with pytest.raises(InputError, match="ids: expected one for each of 2 prompts, not 1"):
        decode(pair, [text, text], FixedLength(3), settings=settings, ids=["a"])


def test_where_token_ids_are_expected_a_text_is_refused_by_name(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    text: Any = prompts[5].text
    speculator = Speculator(pair, FixedLength(2), Settings(0.0, 4))
    for call in (
        lambda: speculator.run(text),
        lambda: speculator.run([Request(text)]),
        lambda: speculator.generate(text),
        lambda: plain_texts(pair, text, [0], 4),
        lambda: plain_texts(pair, [text], [0], 4),
    ):
        with pytest.raises(InputError, match="prompts: expected"):
            call()


def test_names_by_themselves_are_lists_of_one(pair: Pair, traces: dict[float, Trace]) -> None:
    assert check_hidden("draft_hidden") == ("draft_hidden",)
    assert traces[0.0].table("prompt_id").column_names == ["prompt_id"]
    arrays = trace_arrays(traces[0.0], "top1")
    assert torch.equal(arrays.tensors(["top1"])[0], trace_arrays(traces[0.0]).tensors(["top1"])[0])


def test_policies_are_named_as_on_the_command_line(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], sides: tuple[Trace, Trace], full_profile: Profile,
    learned: LearnedPolicy, tmp_path: Path,
) -> None:  # fmt: skip
    settings = Settings(0.0, 8)
    expected = decode(pair, prompts[5].text, FixedLength(3), settings=settings)
    made = decode(pair, prompts[5].text, "fixed:3", settings=settings)
    assert (made.tokens, len(made.rounds)) == (expected.tokens, len(expected.rounds))
    save_policy(learned, tmp_path / "policy")
    for place in (tmp_path / "policy", str(tmp_path / "policy")):
        with pytest.warns(SpecstopWarning, match="trained for another temperature"):
            made = decode(pair, prompts[5].text, place, settings=settings)
        assert made.tokens == expected.tokens
    for one in (prompts[5].text, prompts[5:6], prompt_ids[5:6]):
        assert [line.name for line in bench(pair, one, "fixed:2", settings=settings)] == ["plain", "fixed:2"]
    trace = collect(pair, prompts, tmp_path / "t", collector="live", policy="fixed:2", depth=2, max_new_tokens=6)
    assert trace.header.policy == FixedLength(2).name
    report = evaluate(sides[1], full_profile, "confidence:0.3")
    assert any("confidence" in line.name for line in report.lines)
    with pytest.raises(PolicyError, match=r"unknown policy 'fixd:3'.*did you mean"):
        decode(pair, "w7", "fixd:3")


def test_verification_has_one_default_everywhere() -> None:
    from specstop.cli.main import app

    defaults = {Settings().verification, CollectOptions().verification}
    for function in (specstop_generate, measure_profile):
        defaults.add(inspect.signature(function).parameters["verification"].default)
    for command in ("decode", "bench", "collect", "profile"):
        (option,) = [one for one in get_command(app).commands[command].params if one.name == "verification"]  # type: ignore[attr-defined]
        defaults.add(option.default)
    assert defaults == {"auto"}


def test_errors_and_warnings_name_parameters_and_the_command_line_has_its_options() -> None:
    text = "--max-new-tokens: leaves no room, less --depth; see `specstop profile --batch 2`, or give --no-cross-fit"
    named = "max_new_tokens: leaves no room, less `depth`; see `specstop profile --batch 2`, or give `cross_fit=False`"
    for kind in (InputError, PairError, PolicyError, TraceError, SpecstopWarning):
        assert str(kind(text)) == named and kind(text).command_line == text
    for unchanged in ("a -- b, x--y, 1--2 and --", "expected a number, not '--depth'", "./--depth does not exist"):
        assert str(InputError(unchanged)) == unchanged


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("temperature", [1e-3, 0.5])
def test_a_low_temperature_is_accepted_with_and_without_other_processors(
    plain_pair: Pair, prompt_ids: list[list[int]], top_k: int, temperature: float
) -> None:
    ids = torch.tensor([prompt_ids[5]])
    made = plain_pair.target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=top_k,
        max_new_tokens=NEW, custom_generate=specstop_generate, draft_model=plain_pair.draft, seed=0,
    )  # fmt: skip
    assert made.shape[1] > ids.shape[1]
    if temperature < 0.01:
        greedy = plain_pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
        )
        assert np.array_equal(made, greedy), "so low that it is all but greedy"
