"""Drafts for the requests of an engine are those of each request alone, however the engine changes its batch.

The rest is specific to vLLM (proposer, settings, coefficients) and to SGLang (rule for the number of draft steps).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from simulated_engine import Engine, Request
from small_drafters import new_round, proposed
from specstop.decode import Pair, Settings, Speculator, find_drafters, plain_texts
from specstop.decode.drafters import Drafter, with_drafter
from specstop.decode.engines import drafting as drafting_module
from specstop.decode.engines.drafters import load_engine_drafters
from specstop.decode.engines.drafting import Drafting, Options
from specstop.decode.engines.settings import EngineSettings, check_engine_policy, read_settings
from specstop.decode.engines.sglang import CostedSteps, costed_steps_factory, rule_entry
from specstop.decode.engines.vllm import Proposer
from specstop.decode.topology import chain
from specstop.policies import InputError, LearnedPolicy, PairError, PolicyError, SpecstopWarning, load_policy
from specstop.policies.contract import DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.features import HISTORY_FEATURES, ROUTE_FEATURES
from specstop.policies.learned import TrainingMetadata
from specstop.policies.routing import RoutingPolicy

K, LEAST = 5, 0.4


def alone(drafter: Drafter, text: list[int], least: float = LEAST) -> list[int]:
    """Return the draft for a text that is read in one call, up to the first token less likely than `least`."""
    drafter.reserve(1, 128)
    drafter.begin(0)
    drafter.committed(0, text[:-1], None)
    round = new_round(text[-1:], chain(K))
    for depth in range(K):
        scores = proposed(drafter, round, depth)[0]
        if not torch.isfinite(scores).any():
            break
        round.tokens[0, depth + 1] = int(scores.argmax())
        if scores.softmax(-1).max() < least:
            break
    return [token for token in round.tokens[0, 1:].tolist() if token >= 0]


@pytest.fixture(scope="module")
def requests(plain_pair):
    """14 requests with texts of the target. Two have equal prompts, and two have prompts with a common prefix."""
    chance = np.random.default_rng(1)
    prompts = [chance.integers(17, 48, n).tolist() for n in chance.integers(2, 12, 12)]
    prompts += [prompts[3], [*prompts[5], 20, 21]]
    texts = plain_texts(plain_pair, prompts, [0] * 14, 24, ignore_eos=True).tokens
    return [Request(f"r{at}", prompt, text) for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True))]


class DraftingRun:
    """Serves copies of requests in an engine that drafts with `Drafting`; `drafts` are (text, draft) pairs."""

    def __init__(
        self, drafters: Sequence[Drafter], policy: StopPolicy, seed: int, requests: Sequence[Request], named: bool = True,
        **more: int,
    ) -> None:  # fmt: skip
        options = Options(**{"rows": 4, "depth": K, "readable": 128, "vocabulary": VOCABULARY, **more})
        self.drafting, self.named = Drafting(drafters, policy, options), named
        self.engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], options.rows, seed)
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.engine.run(self.propose)

    def propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        at = [i for i, new in enumerate(sampled) if new]
        texts = [tokens[i, : lengths[i]] for i in at]
        drafts = self.drafting.propose(texts, [self.engine.names[i] for i in at] if self.named else None)
        self.drafts += [(text.tolist(), draft) for text, draft in zip(texts, drafts, strict=True)]
        by_row = dict(zip(at, drafts, strict=True))
        return [by_row.get(i, []) for i in range(len(sampled))]


class ByAnchor(RoutingPolicy):
    """Chooses the drafter, or none, by the anchor. Keeps what it reads and observes."""

    name = "by-anchor"

    def __init__(self) -> None:
        stops = [load_policy(f"confidence:{LEAST}")] * 2
        super().__init__(stops, [*ROUTE_FEATURES, *HISTORY_FEATURES, "anchor_token"])
        self.reads_seconds, self.log = True, []

    def route(self, features: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        self.log.append(features.ravel())
        chosen = features[:, :1, len(ROUTE_FEATURES + HISTORY_FEATURES)] % (features.shape[1] + 1)
        return np.arange(features.shape[1]) == chosen, state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.log.append(np.concatenate([getattr(outcome, field.name).ravel() for field in fields(outcome)]))
        return super().observe(outcome, state)


@pytest.mark.parametrize("spec", ["model", "lookup", "suffix", "suffix+model"])
def test_each_draft_is_that_of_its_text_alone(pair, plain_pair, requests, spec, monkeypatch):
    """Requests are preempted, moved, aborted, trimmed and read in chunks; the cache grows in the runs with names."""
    events, reference = Counter[str](), find_drafters(spec, plain_pair)

    def expected(text: list[int]) -> list[int]:
        chosen = text[-1] % 3 if len(reference) == 2 else 0
        return alone(reference[chosen], text) if chosen < 2 else []

    for seed, initial in ((0, 256), (1, 4)):
        monkeypatch.setattr(drafting_module, "_INITIAL_TOKENS", initial)
        policy = load_policy(f"confidence:{LEAST}") if len(reference) == 1 else ByAnchor()
        run = DraftingRun(find_drafters(spec, pair), policy, seed, requests, named=bool(seed))
        events.update(run.engine.counts)
        assert all(draft == expected(text) for text, draft in run.drafts[:: 2 if spec == "lookup" else 9])
        assert run.drafting.policy.name == policy.name
        assert len({len(draft) for _, draft in run.drafts}) > 2
    assert min(events.values()) > 1 and events["rounds"] > 40


# What a policy observes


def test_a_policy_that_routes_reads_and_observes_what_it_does_in_the_loop(pair, requests, profile):
    """Signals, history, outcomes and modelled seconds, round by round, until the loop reaches its limit."""
    costs, rounds = dataclasses.replace(profile, others=(dataclasses.replace(profile, step_s=9e-4),)), 0
    settings = Settings(0.0, 24, K, ignore_eos=True)
    for request in requests[:4]:
        live, served = ByAnchor(), ByAnchor()
        Speculator(with_drafter(pair, "suffix+model"), live, settings, costs).generate(request.prompt)
        drafters = find_drafters("suffix+model", pair)
        drafting = Drafting(drafters, served, Options(1, K, 128, VOCABULARY), costs)
        engine = Engine([Request(request.name, request.prompt, request.answer)], 1, 0, gentle=True)
        engine.run(lambda sampled, lengths, tokens: drafting.propose([tokens[0, : lengths[0]]]))  # noqa: B023
        inside = sum(context + K < len(request.prompt) + 24 for context, *_ in engine.finished[0].rounds[1:])
        theirs, mine = (np.concatenate(policy.log[: 2 * inside]) for policy in (live, served))
        assert np.allclose(theirs, mine, rtol=1e-4)
        rounds += inside
    assert rounds > 20


def test_requests_of_a_step_share_the_modelled_seconds_of_its_batch(pair, profile):
    """Also if all of them were omitted from the next step, which verifies nothing."""
    verify = {1: ((1, 1e-3), (9, 2e-3)), 2: ((2, 1e-3), (18, 4e-3))}
    table = BatchTable(8.0, ((1, 1e-4), (2, 2e-4)), verify)
    costs = dataclasses.replace(profile, batch=BatchCosts(table, dataclasses.replace(table, context=40.0)))
    seconds: list[np.ndarray] = []

    class Observing(StopPolicy):
        name, max_depth = "observing", 2

        def keep(self, step: DraftStep, state: State) -> Any:
            return step.alive.copy(), state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            seconds.append(outcome.seconds)
            return state

    tool = Drafting(find_drafters("model", pair), Observing(), Options(2, K, 128, VOCABULARY), costs)
    texts = [[20, 21, 22], [30, 31, 32]]
    drafts = tool.propose([np.array(text) for text in texts])
    tool.propose([np.array([40, 41])])  # in the row of the first text
    texts[1] += [*drafts[1], 33]
    tool.propose([np.array(texts[1])])
    drafted = np.array([len(drafts[1])])
    expected = costs.batch_seconds(np.array([3]), drafted, drafted, drafted - 1, costs.decision("observing"))
    assert not seconds[0].any() and seconds[1] == pytest.approx([0.0, expected])


def test_a_draft_is_a_chain_of_one_drafter(pair):
    """Even if a plugin keeps several drafters without `joins`. A drafter that fails leaves the others."""

    class Both(StopPolicy):
        name, first, max_depth, routes = "both", 0, K, True

        def keep(self, step: DraftStep, state: State) -> Any:
            return step.alive.copy(), state

    lookup, model = find_drafters("lookup+model", pair)
    text = [20, 21, 22, 20, 21]
    options = Options(1, K, 128, VOCABULARY)
    expected = [alone(drafter, text, 0.0) for drafter in (lookup, model)]
    assert Drafting([lookup, model], Both(), options).propose([np.array(text)]) == expected[:1]
    tool = Drafting([lookup, model], load_policy("agreement:9?lengths=5+5"), options)
    lookup.committed = Mock(side_effect=RuntimeError("no words left"))
    with pytest.warns(SpecstopWarning, match="no words left"):
        assert tool.propose([np.array(text)]) == expected[1:]
    joining = Both()
    joining.joins = True
    with pytest.raises(PolicyError, match="chains"):
        check_engine_policy(joining)


@pytest.mark.parametrize("first", [0, 1])
def test_a_policy_observes_each_round_and_the_outcome_of_each_draft(pair, requests, first):
    """Its state grows within a round and is reset by `observe`; rows are at different depths and may draft nothing."""
    outcomes: list[tuple[int, int, int]] = []

    class Observing(StopPolicy):
        name, max_depth = "observing", 4

        def start(self, streams: int, keys: Any) -> State:
            return np.zeros((streams, 0)), np.asarray(keys).copy()

        def keep(self, step: DraftStep, state: State) -> Any:
            columns, lengths = state
            assert columns.shape[1] == step.depth - self.first
            kept = step.alive & (lengths % 4 + self.first > step.depth)[:, None]
            return kept, (np.concatenate([columns, step.alive], 1), lengths)

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            values = outcome.verified, outcome.accepted, state[1] % 4 + self.first
            outcomes.extend(zip(*(column[outcome.active].tolist() for column in values), strict=True))
            return np.zeros((len(state[0]), 0)), state[1] + outcome.active

    policy = Observing()
    policy.first = first
    run = DraftingRun(find_drafters("model", pair), policy, 5, requests)
    assert type(run.drafting.policy) is Observing, "its assertion did not fail"
    expected: Counter[tuple[int, int]] = Counter()
    for request in run.engine.finished:
        for _, draft, new in request.rounds[1:]:
            agreed = next((at for at, (a, b) in enumerate(zip(draft, new, strict=False)) if a != b), len(draft))
            # If the engine trimmed the draft, the last new token is the one that the target adds.
            expected[(len(draft), agreed) if agreed < len(new) else (len(new) - 1, len(new) - 1)] += bool(draft)
    assert not expected - Counter((verified, accepted) for verified, accepted, _ in outcomes)
    assert {length for *_, length in outcomes} == set(range(first, 4 + first))
    assert all(verified <= length for verified, _, length in outcomes)


def drafting(pair: Pair, policy: Any, rows: int = 1, readable: int = 128, **more: Any) -> Drafting:
    policy = load_policy(policy) if isinstance(policy, str) else policy
    return Drafting(find_drafters("model", pair), policy, Options(rows, K, readable, pair.vocabulary, **more))


@pytest.mark.parametrize("named", [True, False])
def test_a_request_keeps_its_state_until_its_row_is_needed(pair, named):
    """Requests move in the batch and are omitted from steps; names distinguish equal texts."""

    class Counting(StopPolicy):
        """Drafts one token more in each round of a request."""

        name, first, max_depth = "counting", 0, K

        def start(self, streams: int, keys: Any) -> State:
            return np.zeros(streams, dtype=np.int64)

        def keep(self, step: DraftStep, state: State) -> Any:
            return step.alive & (step.depth <= state)[:, None], state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return state + outcome.active

    tool = drafting(pair, Counting(), 2)
    texts = {"a": [20, 21, 22], "b": [20, 21, 22] if named else [30, 31, 32], "c": [40, 41, 42]}
    lengths: dict[str, list[int]] = {name: [] for name in texts}

    def step(names: str) -> None:
        drafts = tool.propose([np.array(texts[name]) for name in names], list(names) if named else None)
        for name, draft in zip(names, drafts, strict=True):
            lengths[name].append(len(draft))
            texts[name].append(43)

    for names in ("ab", "ba", "b", "ab", "cb", "ca"):  # c takes the row of a, which then takes that of b
        step(names)
    assert lengths == {"a": [1, 2, 3, 1], "b": [1, 2, 3, 4, 5], "c": [1, 2]}
    texts["c"] += [44] * 20  # more tokens than a step commits: without a name it is another text
    step("ca")
    assert (lengths["c"][-1], lengths["a"][-1]) == (3 if named else 1, 2)
    texts["c"] = [45, 46]  # a name can be reused
    step("c")
    assert lengths["c"][-1] == 1


def test_limits_of_a_draft(pair, plain_pair):
    """An end of text, the maximum length of a text, the number of rows, and a policy of length 0."""
    text = [20, 21, 22]
    tokens = alone(find_drafters("model", plain_pair)[0], text, 0.0)
    for options, expected in (
        ({"eos": (tokens[1],)}, tokens[: tokens.index(tokens[1]) + 1]),
        ({"readable": len(text) + K}, tokens), ({"readable": len(text) + K - 1}, []),
    ):  # fmt: skip
        assert drafting(pair, "fixed:5", **options).propose([np.array(text)]) == [expected]
    drafts = drafting(pair, "fixed:2", 2).propose([np.array([20, 21 + i]) for i in range(3)])
    assert [len(draft) for draft in drafts] == [2, 2, 0]
    assert drafting(pair, "fixed:0").propose([np.array([20, 21])]) == [[]]


# Failures


@pytest.mark.parametrize("method", ["start", "keep", "observe"])
def test_a_policy_that_fails_is_replaced_with_one_warning(pair, requests, method):
    methods = {
        "keep": lambda self, step, state: (step.alive.copy(), state),
        method: Mock(side_effect=ZeroDivisionError("7")),
    }
    policy = type("Broken", (StopPolicy,), methods)()
    with pytest.warns(SpecstopWarning, match="7.*fixed:2") as caught:
        run = DraftingRun(find_drafters("model", pair), policy, 1, requests[:5], fallback=2)
    assert len(caught) == 1 and run.drafting.policy.name == "fixed:2"
    assert {len(draft) for _, draft in run.drafts[-4:]} == {2}


@pytest.mark.parametrize(("method", "calls"), [("keep_prefix", 5), ("committed", 7), ("backlog", 8), ("propose", 8)])
def test_after_a_failure_of_the_drafter_requests_are_finished_without_drafts(pair, requests, method, calls):
    drafter = find_drafters("lookup", pair)[0]
    failing = Mock(wraps=getattr(drafter, method), side_effect=[*[DEFAULT] * calls, RuntimeError("no words left")])
    setattr(drafter, method, failing)
    with pytest.warns(SpecstopWarning, match="drafter failed .*no words left") as caught:
        run = DraftingRun([drafter], load_policy(f"confidence:{LEAST}"), 0, requests)
    lengths = [len(draft) for _, draft in run.drafts]
    assert len(caught) == 1 and any(lengths) and not any(lengths[-40:])
    assert failing.call_count == calls + 1, "it is not called again"
    with pytest.raises(InputError, match=r"drafter failed .*no words left"):
        run.drafting.check_failed()  # as `collect` and `profile` do


def load(drafter: str, target: Path, draft: str = "", policy: str = "fixed:4") -> list[Drafter]:
    arguments = str(target), torch.device("cpu"), torch.float64, VOCABULARY
    return load_engine_drafters(drafter, load_policy(policy), draft, *arguments)


def test_drafters_are_loaded_without_the_engines_target(pair_folder, tmp_path):
    (tmp_path / "code.txt").write_text("a b c", encoding="utf-8")
    for spec in ("lookup", f"suffix:{tmp_path / 'code.txt'}", "model"):
        draft = str(pair_folder / "draft") if spec.endswith("model") else ""
        (drafter,) = load(spec, tmp_path if spec == "model" else pair_folder / "target", draft)
        drafter.reserve(2, 64)
        drafter.begin(1)
        drafter.committed(1, [20, 21], None)
        assert drafter.propose(new_round([0, 20], chain(K)), 0, [(1, [0])]).dense(48).shape == (1, 48)
        assert (drafter.readable < 1 << 20) == bool(draft)
    with pytest.raises(InputError, match="hidden"):
        load("ctc:heads", pair_folder / "target")
    two = "suffix+model", pair_folder / "target", str(pair_folder / "draft")
    for policy, expected in (("agreement:1", [False, True]), ("fixed:4", [False]), ("fixed:4@model", [True])):
        assert [drafter.needs_draft for drafter in load(*two, policy)] == expected
    with pytest.raises(PairError, match="target"):
        load("lookup", tmp_path)


# vLLM and SGLang


def vllm_config(pair_folder: Path, vocabulary: int = 48, **settings: Any) -> SimpleNamespace:
    """Return a configuration like that of vLLM 0.32."""
    model = SimpleNamespace(
        model=str(pair_folder / "target"), dtype=torch.float64, max_model_len=128,
        hf_text_config=SimpleNamespace(eos_token_id=2), get_vocab_size=lambda: vocabulary,
        try_get_generation_config=lambda: {"eos_token_id": 16},
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"specstop": {"draft": str(pair_folder / "draft"), **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=5), model_config=model,
        device_config=SimpleNamespace(device=torch.device("cpu")), scheduler_config=SimpleNamespace(max_num_seqs=3),
    )  # fmt: skip


def test_requests_that_commit_nothing_have_no_draft(pair_folder, plain_pair):
    proposer = Proposer(vllm_config(pair_folder, policy="fixed:3"))
    proposer.load_model(None)
    tokens = np.zeros((3, 64), dtype=np.int32)
    tokens[:, :4] = [[20, 21, 22, 23], [30, 31, 32, 33], [20, 21, 25, 26]]
    drafts = proposer.propose([[23], [], [26]], np.array([4, 4, 4]), tokens, slot_mappings=None)
    assert drafts[1] == []
    for row in (0, 2):
        expected = alone(find_drafters("model", plain_pair)[0], tokens[row, :4].tolist(), 0.0)
        assert drafts[row] == expected[: len(drafts[row])] and (len(drafts[row]) == 3 or drafts[row][-1] == 16)
    with pytest.raises(PairError, match=r"48 .*4000"):
        Proposer(vllm_config(pair_folder, vocabulary=4000)).load_model(None)


@pytest.mark.parametrize(
    ("features", "temperature", "hidden", "missing"),
    [
        (("anchor_prob", "anchor_token", "before_token", "temperature", "mean_full"), 0.7, (), ["anchor_prob"]),
        (("noisy_margin", "top1", "noisy_lead"), 0.7, (), ["noisy_margin", "noisy_lead"]),
        (("noisy_margin", "top1"), 0.0, (), []),  # without noise it is a margin of the draft's logits
        (("top1",), 0.0, ("draft_hidden", "target_hidden"), ["draft_hidden", "target_hidden"]),
    ],
)
def test_features_that_engines_do_not_provide_are_named(features, temperature, hidden, missing):
    policy = LearnedPolicy.__new__(LearnedPolicy)
    policy.name, policy.features, policy.hidden = "mine", features, hidden
    policy.metadata = TrainingMetadata(temperature=temperature)
    with (
        pytest.raises(PolicyError, match=f"mine: reads {', '.join(missing)}, which vllm") if missing else nullcontext()
    ):
        assert check_engine_policy(policy) is policy
    rule = load_policy("fixed:2")
    rule.features = ("noisy_score",)
    with pytest.raises(PolicyError, match="noisy_score"):
        check_engine_policy(rule)  # whatever the temperature


@pytest.mark.parametrize(
    ("raw", "noun"),
    [
        (None, "object"), ({"specstop": {"drafter": "model"}}, "draft"), ({"specstop": {"polcy": "x"}}, "policy"),
        ({"specstop": {"draft": 3}}, "draft"), ({"specstop": {"draft": "d", "temperature": -1.0}}, "temperature"),
        ({"specstop": {"draft": "d", "rows": 0}}, "rows"), ({"specstop": {"draft": "d", "rows": True}}, "rows"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_by_name(raw, noun):
    with pytest.raises(InputError, match=noun):
        read_settings(raw)
    settings = read_settings({"other": 1, "specstop": {"draft": "d", "policy": "fixed:2", "temperature": 1, "rows": 8}})
    assert settings == EngineSettings(draft="d", policy="fixed:2", temperature=1.0, rows=8)


CANDIDATES = {1: [1, 2, 4], 8: [0, 1, 2]}


def rule(acceptance: float = 0.8, row: float = 0.1) -> dict[str, Any]:
    """Return a rule with a cost of k steps of 1 + row x k x batch."""
    return rule_entry([acceptance] * 4, {size: [1 + row * k * size for k in range(5)] for size in (1, 8)}, 1.0)


@pytest.mark.parametrize("acceptance", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.3])
def test_the_steps_are_those_with_the_most_tokens_per_second(acceptance, row):
    policy = CostedSteps(CANDIDATES, rule(acceptance, row))
    for size in (1, 4, 64):  # beyond the last size of the table its seconds apply
        rates = {n: sum(acceptance**k for k in range(n + 1)) / (1 + row * n * min(size, 8)) for n in range(5)}
        assert policy.get_steps_for_batch(size) == max(CANDIDATES[8 if size >= 8 else 1], key=rates.get)
    assert policy.candidate_steps == [0, 1, 2, 4] and policy.cuda_graph_bs_for_step(4) is None
    policy.set_cuda_graph_bs([8, 1, 4])
    assert policy.cuda_graph_bs_for_step(4) == [1, 4] and policy.cuda_graph_bs_for_step(0) == [8]
    assert policy.get_steps_for_batch(5) in CANDIDATES[8], "padded to a recorded size"


def test_the_steps_follow_the_observed_acceptance():
    """Later observations outweigh earlier ones."""
    policy = CostedSteps(CANDIDATES, rule(0.9, 0.1))
    assert policy.get_steps_for_batch(1) == 4
    assert 1 in [policy.on_verify_complete([0], 1) for _ in range(20)] and policy.get_steps_for_batch(1) == 1
    assert any(step is not None and step > 1 for step in (policy.on_verify_complete([1], 1) for _ in range(200)))


def test_without_a_complete_entry_of_ours_the_rule_of_sglang_applies_or_an_error_is_raised(tmp_path):
    factory = costed_steps_factory(lambda steps, path: ("theirs", steps, path))
    plain, ours = tmp_path / "plain.json", tmp_path / "ours.json"
    entries = {str(size): {"candidate_steps": steps} for size, steps in CANDIDATES.items()}
    plain.write_text(json.dumps(entries))
    ours.write_text(json.dumps({**entries, "specstop": rule()}))
    assert factory(3) == ("theirs", 3, None)
    assert factory(initial_steps=3, cfg_path=str(plain)) == ("theirs", 3, str(plain))
    assert isinstance(factory(3, str(ours)), CostedSteps)
    for wrong in ({"acceptance": [0.5]}, {"seconds": {"1": [1.0, 1.1]}}, {"seconds": {}}):
        with pytest.raises(ValueError, match="steps"):
            CostedSteps(CANDIDATES, rule() | wrong)
