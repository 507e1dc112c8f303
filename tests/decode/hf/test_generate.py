"""The loop in `generate` of transformers, with arguments supported or refused by name, and from exported folders.

Policies in assisted generation, and the baseline of the benchmark.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers as hub
from conftest import EOS, NEW, build_model
from contract_policies import TEST_POLICIES
from head_tensors import learned
from small_drafters import small_network
from specstop.decode import Pair, PolicyStoppingCriteria, SamplingParams, Settings, Speculator, plain_texts
from specstop.decode.drafters import TrainedDrafter, load_drafter, save_drafter
from specstop.decode.hf.baseline import LOOKUP_SETTINGS, PLAIN, SETTINGS, Assisted
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request
from specstop.decode.verify.noise import stream_key
from specstop.policies import Confidence, FixedLength, InputError, PolicyError, save_policy
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.rules import Threshold
from specstop.train.export.deploy import deploy
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

Prompts = list[list[int]]

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}


@pytest.fixture(scope="session")
def pair(plain_pair):
    return plain_pair


def inputs(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return a batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def stock(pair: Pair, prompts: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """Return the output of `generate` without custom code."""
    return pair.target.generate(**inputs(prompts), **{"max_new_tokens": NEW, "do_sample": False, **options})


def ours(pair: Pair, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "policy": "fixed:3", "draft_model": pair.draft, **options}
    return pair.target.generate(**inputs(prompts), custom_generate=specstop_generate, **options)


LOOPS: list[dict[str, Any]] = [
    {}, {"policy": Confidence(0.4)}, {"tree": "3,2,1"}, {"verification": "rejection", "tree": "2,2"},
    {"drafter": "lookup", "draft_model": None}, {"drafter": "lookup:2", "draft_model": None, "tree": "3,1"},
]  # fmt: skip
SUPPORTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 18}, {"eos_token_id": [EOS, 9, 30]},
    {"max_length": 14, "max_new_tokens": None}, {"max_new_tokens": 1}, {"bad_words_ids": [[9], [30, 31]]},
    {"prefix_allowed_tokens_fn": lambda batch, ids: [t for t in range(48) if t % 3 != batch]},
    {"cache_implementation": "static", "disable_compile": True, "max_time": 60.0, "early_stopping": True},
    {"renormalize_logits": True, "remove_invalid_values": True}, {"forced_bos_token_id": 7}, {"forced_eos_token_id": 7},
    {"suppress_tokens": [9, 11]}, {"begin_suppress_tokens": [9, 11, 3]}, {"sequence_bias": [[[9], -5.0], [[30, 31], 2.0]]},
    {"exponential_decay_length_penalty": (3, 1.5)}, {"logits_to_keep": 3},
    {"watermarking_config": hub.WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")},
]  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "options"),
    [*((loop, {}) for loop in LOOPS), *(({"tree": (None, "3,2")[at % 2]}, one) for at, one in enumerate(SUPPORTED))],
)
def test_greedy_text_is_that_of_generate_with_supported_options(pair, prompt_ids, loop, options):
    """Chains and trees in turn; tests/decode/verify checks that processors see every branch."""
    for prompts in (prompt_ids[4:7],) if options else (prompt_ids[4:5], prompt_ids):
        out = ours(pair, prompts, **loop, **options, return_dict_in_generate=True)
        assert torch.equal(out.sequences, stock(pair, prompts, **options)), "a batch is padded on the left"
        figures, depths = out.statistics, out.statistics["acceptance"]
        assert figures["texts"] == len(prompts) and figures["drafted"] >= figures["accepted"] >= 0
    assert options or (figures["accepted"] > 0 and depths[0][0] == 1 and 0.0 < depths[0][1] <= 1.0)


def test_a_grammar_is_not_called_after_the_end_of_a_text(pair, prompt_ids):
    prompt, texts = prompt_ids[4], list[list[int]]()

    def allowed(batch: int, ids: Tensor) -> list[int]:
        texts.append(ids.tolist()[len(prompt) :])
        if EOS in texts[-1]:
            return []  # transformers raises an error
        return [EOS] if len(texts[-1]) == 5 else [t for t in range(48) if t != EOS]

    out = ours(pair, [prompt], prefix_allowed_tokens_fn=allowed, tree="3,2", draft_model=copy.deepcopy(pair.target))
    assert max(map(len, texts)) >= 5 and out[0, -1] == EOS
    assert torch.equal(out, stock(pair, [prompt], prefix_allowed_tokens_fn=allowed))


def test_sampling_is_reproducible_by_the_seed_of_torch_or_of_the_call(pair, prompt_ids):
    def sample(manual: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(manual)
        return ours(pair, prompt_ids[3:6], **{**SAMPLING, **options}).tolist()

    assert sample(1) == sample(1) != sample(2)
    assert sample(1, seed=5) == sample(2, seed=5) != sample(1, seed=6)
    match = {"verification": "match"}
    assert sample(1, **match) == sample(1, policy="confidence:0.3", tree="3,2", **match), "the text depends on the key"
    assert sample(1, verification="rejection") == sample(1, verification="rejection")


@pytest.mark.parametrize(
    ("temperature", "options", "sampling"),
    [
        (0.8, {}, SamplingParams()),
        (1.0, {"top_k": 9, "top_p": 0.8, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 8},
         SamplingParams(top_k=9, top_p=0.8, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=8)),
    ],
)  # fmt: skip
def test_a_sampled_row_is_plain_sampling_with_its_key(pair, prompt_ids, temperature, options, sampling):
    options = {**SAMPLING, "temperature": temperature, **options}
    out = ours(pair, prompt_ids, seed=4, tree="3,2", verification="match", **options)
    keys, longest = [stream_key(4, str(i)) for i in range(len(prompt_ids))], max(map(len, prompt_ids))
    expected = plain_texts(pair, prompt_ids, keys, NEW, temperature, sampling=sampling).tokens
    for row, text in zip(out.tolist(), expected, strict=True):
        assert row[longest:] == text + [0] * (out.shape[1] - longest - len(text))


class Until(hub.StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stopping_criteria_end_texts_as_in_generate(pair, prompt_ids):
    prompts = prompt_ids[3:6]
    longest = max(map(len, prompts))
    text = stock(pair, prompts[:1])[0].tolist()
    # These replace the values of the configuration.
    by_end, by_length = EosTokenCriteria(text[-6]), MaxLengthCriteria(len(text) - 4)
    for batch, criteria in (
        *((prompts, [Until(longest + more)]) for more in (2, 8)),
        *((prompts[:1], items) for items in ([by_end], [by_length], [by_end, by_length])),
    ):
        options = {"stopping_criteria": hub.StoppingCriteriaList(criteria)}
        for tree in (None, "2,2"):
            assert torch.equal(ours(pair, batch, tree=tree, **options), stock(pair, batch, **options))
    assert ours(pair, prompts, max_time=1e-9).shape[1] == longest + 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_receives_the_text_of_generate(pair, tokenizer, prompt_ids, skip_prompt, capsys):
    for prompt in prompt_ids[2:5]:
        stock(pair, [prompt], streamer=hub.TextStreamer(tokenizer, skip_prompt=skip_prompt))
        expected = capsys.readouterr().out
        ours(pair, [prompt], text_streamer=hub.TextStreamer(tokenizer, skip_prompt=skip_prompt))
        assert capsys.readouterr().out == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, rf"{name}\b.*(leave it out|expected|use )") for name, value in {
        "num_beams": 2, "output_scores": True, "penalty_alpha": 0.6, "guidance_scale": 1.5, "num_assistant_tokens": 5,
        "use_cache": False, "cache_implementation": "offloaded", "compile_config": hub.CompileConfig(), "synced_gpus": True,
        "is_causal": True,
    }.items()),
    ({"draft_model": None}, "expected draft_model="),
    ({"drafter": "lookup"}, "lookup takes no draft model"),
    ({"verification": "matsch"}, "did you mean 'match'"),
    ({"tree": "3,2", "verification": "block", "do_sample": True}, "block.*chain"),
    ({"generation_config": hub.GenerationConfig(max_new_tokens=4, my_field=1)}, "my_field"),
    ({"assistant_model": build_model()}, "assistant_model|draft_model="),
    ({"streamer": Mock()}, "text_streamer="),
    ({"text_streamer": Mock()}, "batch of one"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: next(iter(value), "")[:30])
def test_unsupported_arguments_are_refused_by_name(pair, prompt_ids, options, message):
    more = {"return_dict_in_generate": True} if next(iter(options)).startswith("output_") else {}
    with pytest.raises(InputError, match=message) as error:
        ours(pair, prompt_ids[: 2 if message == "batch of one" else 1], **options, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "batch"), [(PLAIN, 1), (PLAIN, 2), (SETTINGS[0], 1), (SETTINGS[-1], 1), (LOOKUP_SETTINGS[0], 1)]
)
def test_the_baseline_of_transformers_writes_the_targets_texts_and_restores_the_assistant(
    pair, prompt_ids, setting, batch
):
    before, prompts = pair.draft_model.generation_config.to_dict(), prompt_ids[1:4]
    requests = [Request(tokens, at) for at, tokens in enumerate(prompts)]
    texts = Assisted(pair, setting, Settings(max_new_tokens=12, ignore_eos=True), batch).run(requests)
    assert [list(t.tokens) for t in texts] == plain_texts(pair, prompts, [0] * 3, 12, ignore_eos=True).tokens
    assert min(t.seconds for t in texts) > 0.0
    assert (texts[0].seconds == texts[1].seconds) == (batch == 2), "texts of one call share its time"
    assert pair.draft_model.generation_config.to_dict() == before


class Decides(StopPolicy):
    """Keeps the branches that a function of the step selects."""

    max_depth = 6

    def __init__(self, name: str, rule: Callable[[DraftStep], Any], **attributes: Any) -> None:
        self.name, self.rule = name, rule
        vars(self).update(attributes)

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & self.rule(step), state


TOKENS = ("anchor_token", "before_token", "drawn_token", "above_token")
BY_TOKENS = Decides("tokens", lambda step: step.features @ np.array([1, 2, 3, 5], np.float32) % 4 > 0, features=TOKENS)
BY_PATH = Decides("path", lambda step: step.features[:, :, 0] > -2.0, features=("path_logprob",), first=2)
BY_HISTORY = Decides("history", lambda step: step.depth <= step.features[:, :, 0] + 1, features=("mean_accepted",))
KNOWN_LENGTH = Decides("known", lambda step: 1 / 0, unasked=MappingProxyType({1: 2}))  # `keep` is never called
READS_STATES = Decides("states", lambda step: True, hidden=("draft_hidden",))
READS_NOISE = Decides("noise", lambda step: True, features=("noisy_margin",))


@pytest.fixture(scope="module")
def begun(endless_pair, prompt_ids):
    """Prompts that end with a token of the target, as each round of our loop begins."""
    return [stock(endless_pair, [prompt], max_new_tokens=3)[0].tolist() for prompt in prompt_ids[4:6]]


def assisted(pair: Pair, prompt: list[int], criteria: PolicyStoppingCriteria) -> tuple[Tensor, list[int]]:
    """Return the text of assisted generation with a policy, and the lengths of its drafts."""
    lengths: list[int] = []
    generate, draft, before = pair.draft_model.generate, pair.draft_model, len(criteria.rounds)

    def counting(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        ids = out.sequences if hasattr(out, "sequences") else out
        lengths.append(ids.shape[1] - kwargs["input_ids"].shape[1])
        return out

    draft.generate = counting  # type: ignore[method-assign]
    config = draft.generation_config.to_dict()
    with criteria.attached_to(draft):
        text = stock(pair, [prompt], assistant_model=draft)
    assert draft.generation_config.to_dict() == config and draft.generate is counting, "the assistant is restored"
    del draft.generate
    drafted = [drafted for drafted, _ in criteria.rounds[before:]]
    assert drafted == lengths[:-1], "the outcome of the last round is not known"
    return text, lengths


@pytest.mark.parametrize(
    "policy",
    [FixedLength(3), Confidence(0.3, 6), BY_TOKENS, BY_PATH, BY_HISTORY, KNOWN_LENGTH, TEST_POLICIES["adaptive"]],
    ids=lambda p: p.name,
)
def test_assisted_text_is_plain_and_its_drafts_are_those_of_our_loop(endless_pair, begun, policy, monkeypatch):
    """The second prompt is a new text for the same criterion. In assisted generation, an end of text would end a draft."""
    monkeypatch.setattr(endless_pair.draft_model.generation_config, "eos_token_id", None)
    speculator, observed = Speculator(endless_pair, policy, Settings(0.0, NEW + 1)), set[int]()
    criteria = PolicyStoppingCriteria(policy)
    for prompt in begun:
        text, drafts = assisted(endless_pair, prompt, criteria)
        assert torch.equal(text, stock(endless_pair, [prompt]))
        assert drafts == [r.drafted for r in speculator.generate(prompt[:-1]).rounds if r.drafted]
        observed |= set(drafts[:-3])
    assert len(observed) > 1 or policy.name in ("fixed:3", "known")


@pytest.mark.parametrize(
    "policy",
    [*(TEST_POLICIES[name] for name in ("from-anchor", "trimming", "selecting")), READS_STATES, READS_NOISE],
    ids=lambda p: p.name,
)
def test_a_policy_that_reads_more_than_assisted_generation_has_is_refused(policy):
    with pytest.raises(PolicyError, match=f"{policy.name}: (reads|leaves)"):
        PolicyStoppingCriteria(policy, temperature=0.7)
    if policy is READS_NOISE:
        PolicyStoppingCriteria(policy)


# Exported folders in `generate(custom_generate=folder)`

RULE = Threshold("step", 0.5)


@pytest.fixture
def out(tmp_path, module_cache):
    return tmp_path / "out"


@pytest.fixture
def policy_folder(tmp_path):
    return save_policy(learned("mlp", RULE), tmp_path / "policy")


@pytest.fixture
def hydra(pair, tmp_path):
    """The folder of heads for the tiny target."""
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network("hydra", output.shape[1], pair.vocabulary, output)
    return save_drafter(TrainedDrafter("hydra", network, pair.fingerprint["target"]), tmp_path / "heads")


def exported(pair: Pair, prompt: Sequence[int], folder: Path, **options: Any) -> Any:
    """Decode with the folder's code."""
    options = {"max_new_tokens": NEW, "do_sample": False, "trust_remote_code": True, **options}
    return pair.target.generate(**inputs([prompt]), custom_generate=str(folder), **options)


def figures_of(output: Any) -> Any:
    return [output.statistics[name] for name in ("target_calls", "drafted", "verified", "accepted", "acceptance")]


def test_an_exported_policy_decodes_as_in_the_library(pair, prompt_ids, policy_folder, out):
    figures, details, rule = deploy("hf", out, policy_folder), {"return_dict_in_generate": True}, "confidence:0.3"
    assert json.loads((out / "figures.json").read_text()) == figures
    for prompt in prompt_ids[2:4]:
        results = [ours(pair, [prompt], policy=policy, **details) for policy in (str(policy_folder), rule)]
        assert figures_of(results[0]) != figures_of(results[1])
        for name in ("draft_model", "assistant_model"):
            result = exported(pair, prompt, out, **{name: pair.draft}, **details)
            assert torch.equal(result.sequences, stock(pair, [prompt])) and figures_of(result) == figures_of(results[0])
    with pytest.raises(InputError, match="not empty"):
        deploy("hf", out, policy_folder)
    deploy("hf", out, rule, overwrite=True)
    assert not (out / "policy").exists()
    result = exported(pair, prompt, out, draft_model=pair.draft, **details)
    assert figures_of(result) == figures_of(results[1])
    with pytest.raises(ValueError, match="trust_remote_code"):
        exported(pair, prompt, out, trust_remote_code=False)


def trained_with(drafter: str, folder: Path, **pair: str) -> Path:
    """Return the folder of a policy that was trained on traces of a drafter."""
    policy = learned("mlp", RULE)
    policy.metadata = replace(policy.metadata, provenance={"drafter": drafter}, pair=pair)
    return save_policy(policy, folder)


@pytest.mark.parametrize("prefix", ["", "suffix+"])
def test_a_head_drafter_is_exported_with_the_policy_trained_on_its_drafts(
    prefix, pair, prompt_ids, hydra, out, tmp_path
):
    spec, identity, prompt = f"{prefix}hydra:{hydra}", load_drafter(hydra).identity, prompt_ids[3]
    policy, details = trained_with(spec, tmp_path / "policy", draft=identity), {"return_dict_in_generate": True}
    assert deploy("hf", out, policy)["drafter"] == f"{prefix}hydra:drafter"
    assert str(tmp_path) not in (out / "README.md").read_text()
    assert load_drafter(out / "drafter").identity == identity
    expected = ours(pair, [prompt], drafter=spec, policy=str(policy), draft_model=None, **details)
    shutil.rmtree(hydra)  # the export does not need it
    result = exported(pair, prompt, out, **details)
    assert torch.equal(result.sequences, expected.sequences) and torch.equal(result.sequences, stock(pair, [prompt]))
    assert figures_of(result) == figures_of(expected) and result.statistics["drafted"] > 0
    for name in ("draft_model", "assistant_model"):
        with pytest.raises(InputError, match="takes no draft model"):
            exported(pair, prompt, out, **{name: pair.draft})
