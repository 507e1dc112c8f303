"""Drafts for the requests of an engine are those of each request alone, however the engine changes its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from simulated_engine import Engine, Request
from small_drafters import new_round, proposed
from specstop.decode.drafters import Drafter, find_drafter
from specstop.decode.engines import drafting as drafting_module
from specstop.decode.engines.drafters import load_engine_drafter
from specstop.decode.engines.drafting import Drafting, EngineDraft, Options, RequestRows
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.topology import chain
from specstop.policies.contract import DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.errors import InputError, PairError, SpecstopWarning
from specstop.policies.registry import load_policy

K, LEAST = 5, 0.4


def greedy(model: torch.nn.Module, text: list[int], count: int, least: float = 0.0) -> list[int]:
    """Return the most likely next tokens by forwards without a cache, up to the first one less likely than `least`."""
    tokens = list(text)
    for _ in range(count):
        with torch.inference_mode():
            probabilities = model(input_ids=torch.tensor([tokens])).logits[0, -1].softmax(-1)
        tokens.append(int(probabilities.argmax()))
        if probabilities.max() < least:
            break
    return tokens[len(text) :]


def alone(drafter: Drafter, text: list[int]) -> list[int]:
    """Return the draft for a text that is read in one call, up to the first token less likely than `LEAST`."""
    drafter.reserve(1, 128)
    drafter.begin(0)
    drafter.committed(0, text[:-1], None)
    round = new_round(text[-1:], chain(K))
    for depth in range(K):
        scores = proposed(drafter, round, depth)[0]
        if not torch.isfinite(scores).any():
            break
        round.tokens[0, depth + 1] = int(scores.argmax())
        if scores.softmax(-1).max() < LEAST:
            break
    return [token for token in round.tokens[0, 1:].tolist() if token >= 0]


@pytest.fixture(scope="module")
def requests(plain_pair):
    """14 requests with texts of the target; two have equal prompts, and two have prompts with a common prefix."""
    chance = np.random.default_rng(1)
    prompts = [chance.integers(17, 48, n).tolist() for n in chance.integers(2, 12, 12)]
    prompts += [prompts[3], [*prompts[5], 20, 21]]
    texts = plain_texts(plain_pair, prompts, [0] * 14, 24, ignore_eos=True).tokens
    return [Request(f"r{at}", prompt, text) for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True))]


class DraftingRun:
    """Serves copies of requests in an engine that drafts with `Drafting`; `drafts` are (text, draft) pairs."""

    def __init__(
        self, drafter: Drafter, policy: StopPolicy, seed: int, requests: Sequence[Request], named: bool = True, **more: int
    ) -> None:  # fmt: skip
        options = Options(**{"rows": 4, "depth": K, "readable": 128, "vocabulary": VOCABULARY, **more})
        self.drafting, self.named = Drafting(drafter, policy, options), named
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


@pytest.mark.parametrize("spec", ["model", "lookup", "suffix", "suffix+model"])
def test_each_draft_is_that_of_its_text_alone(pair, plain_pair, requests, spec, monkeypatch):
    """Requests are preempted, moved, aborted, trimmed and read in chunks; the cache grows in the runs with names."""
    events, reference = Counter[str](), find_drafter(spec, pair)
    for seed, initial in ((0, 256), (1, 4)):
        monkeypatch.setattr(drafting_module, "_INITIAL_TOKENS", initial)
        policy = load_policy(f"confidence:{LEAST}")
        run = DraftingRun(find_drafter(spec, pair), policy, seed, requests, named=bool(seed))
        events.update(run.engine.counts)
        for text, draft in run.drafts[:: 2 if spec == "lookup" else 9]:
            expected = greedy(plain_pair.draft_model, text, K, LEAST) if spec == "model" else alone(reference, text)
            assert draft == expected
        assert len({len(draft) for _, draft in run.drafts}) > 2
    assert min(events.values()) > 1 and events["rounds"] > 40


# What a policy observes


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
    run = DraftingRun(find_drafter("model", pair), policy, 5, requests)
    assert type(run.drafting.policy) is Observing, "its assertion did not fail"
    expected: Counter[tuple[int, int]] = Counter()
    for request in run.engine.finished:
        for _, draft, new in request.rounds[1:]:
            if draft:
                outcome = EngineDraft(0, 0, draft)
                outcome.set_outcome(new)
                expected[outcome.verified, outcome.accepted] += 1
    assert not expected - Counter((verified, accepted) for verified, accepted, _ in outcomes)
    assert {length for *_, length in outcomes} == set(range(first, 4 + first))
    assert all(verified <= length for verified, _, length in outcomes)


@pytest.mark.parametrize(
    ("draft", "new", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], (3, 3)), ([5, 6, 7], [5, 6, 9], (2, 3)), ([5, 6, 7], [4], (0, 3)), ([], [4], (0, 0)),
        ([5, 6, 7], [5], (0, 0)),  # trimmed to nothing, and the target agrees
        ([5, 6, 7], [5, 6], (1, 1)),
        ([5], [4, 5, 6], (0, 1)),  # steps without a draft
    ],
)  # fmt: skip
def test_the_outcome_of_a_draft_follows_from_the_next_tokens(draft, new, expected):
    outcome = EngineDraft(0, 0, draft)
    outcome.set_outcome(new)
    assert (outcome.accepted, outcome.verified) == expected


def drafting(pair: Pair, policy: Any, rows: int = 1, readable: int = 128, **more: Any) -> Drafting:
    policy = load_policy(policy) if isinstance(policy, str) else policy
    return Drafting(find_drafter("model", pair), policy, Options(rows, K, readable, pair.vocabulary, **more))


def test_a_request_that_is_omitted_from_steps_keeps_its_state(pair):
    class Counting(StopPolicy):
        name, first, max_depth = "counting", 0, K

        def start(self, streams: int, keys: Any) -> State:
            return np.zeros(streams, dtype=np.int64)

        def keep(self, step: DraftStep, state: State) -> Any:
            return step.alive & (step.depth <= state)[:, None], state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return state + outcome.active

    tool, texts = drafting(pair, Counting(), 2), {"a": [20, 21, 22], "b": [30, 31, 32]}
    lengths: dict[str, list[int]] = {"a": [], "b": []}
    for names in ("ab", "b", "ab", "b", "b", "a"):
        for name, draft in zip(names, tool.propose([np.array(texts[n]) for n in names], list(names)), strict=True):
            lengths[name].append(len(draft))
            texts[name].append(40)
    assert lengths == {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5]}


def test_limits_of_a_draft(pair, plain_pair):
    """An end of text, the maximum length of a text, the number of rows, and a policy of length 0."""
    text = [20, 21, 22]
    tokens = greedy(plain_pair.draft_model, text, K)
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
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("seven")

    methods = {"keep": lambda self, step, state: (step.alive.copy(), state), method: fail}
    policy = type("Broken", (StopPolicy,), methods)()
    with pytest.warns(SpecstopWarning, match="seven.*fixed:2") as caught:
        run = DraftingRun(find_drafter("model", pair), policy, 1, requests[:5], fallback=2)
    assert len(caught) == 1 and run.drafting.policy.name == "fixed:2"
    assert {len(draft) for _, draft in run.drafts[-4:]} == {2}


@pytest.mark.parametrize(("method", "calls"), [("keep_prefix", 6), ("committed", 8), ("backlog", 9), ("propose", 9)])
def test_after_a_failure_of_the_drafter_requests_are_finished_without_drafts(pair, requests, method, calls):
    drafter, left = find_drafter("lookup", pair), [calls]
    original = getattr(drafter, method)

    def fail_after_calls(*args: Any) -> Any:
        assert left[0] > 0, "a drafter that has failed was called again"
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("no words left")
        return original(*args)

    setattr(drafter, method, fail_after_calls)
    with pytest.warns(SpecstopWarning, match="drafter failed .*no words left") as caught:
        run = DraftingRun(drafter, load_policy(f"confidence:{LEAST}"), 0, requests)
    lengths = [len(draft) for _, draft in run.drafts]
    assert len(caught) == 1 and any(lengths) and not any(lengths[-40:])
    with pytest.raises(InputError, match=r"drafter failed .*no words left"):
        run.drafting.check_failed()  # as `collect` and `profile` do


def load(drafter: str, target: Path, draft: str = "") -> Drafter:
    return load_engine_drafter(drafter, draft, str(target), torch.device("cpu"), torch.float64, VOCABULARY)


def test_drafters_are_loaded_without_the_engines_target(pair_folder, tmp_path):
    (tmp_path / "code.txt").write_text("a b c", encoding="utf-8")
    for spec in ("lookup", f"suffix:{tmp_path / 'code.txt'}", "suffix+model", "model"):
        draft = str(pair_folder / "draft") if spec.endswith("model") else ""
        drafter = load(spec, tmp_path if spec == "model" else pair_folder / "target", draft)
        drafter.reserve(2, 64)
        drafter.begin(1)
        drafter.committed(1, [20, 21], None)
        assert drafter.propose(new_round([0, 20], chain(K)), 0, [(1, [0])]).dense(48).shape == (1, 48)
        assert (drafter.readable < 1 << 20) == bool(draft)
    with pytest.raises(InputError, match="hidden"):
        load("suffix+ctc:heads", pair_folder / "target")
    with pytest.raises(PairError, match="target"):
        load("lookup", tmp_path)


# Rows of the cache


def rows_of(count: int, growth: int = 9) -> RequestRows:
    """Return rows with texts that may grow by at most `growth` tokens in a step."""
    rows = RequestRows(count)
    for row in rows.rows:
        row.draft = EngineDraft(0, 0, [0] * (growth - 1))
    return rows


def place(rows: RequestRows, *texts: list[int], names: list[str] | None = None) -> list[Any]:
    """Return (row, whether the text continues, tokens kept, new tokens) of each text."""
    placed = rows.place([np.array(text, dtype=np.int32) for text in texts], names)
    return [None if one is None else (one.index, one.continued, one.kept, one.new) for one in placed]


def test_texts_keep_their_rows_when_they_move_or_are_omitted():
    rows = rows_of(3)
    assert [one[:2] for one in place(rows, [1, 2, 3], [1, 2, 4], [9, 9])] == [(0, False), (1, False), (2, False)]
    assert place(rows, [9, 9, 5], [1, 2, 3, 7]) == [(2, True, 2, [5]), (0, True, 3, [7])]
    assert place(rows, [1, 2, 4, 4]) == [(1, True, 3, [4])]
    rows = rows_of(2)
    place(rows, [1, 1], [2, 2])
    place(rows, [1, 1, 1])  # the second is preempted
    assert place(rows, [2, 2, 3], [1, 1, 1, 1], [8]) == [(1, True, 2, [3]), (0, True, 3, [1]), None]
    place(rows, [2, 2, 3, 4])
    assert place(rows, [1, 1, 5], [2, 2, 3, 4, 4]) == [(0, False, 2, [5]), (1, True, 4, [4])], "the oldest is replaced"
    rows = rows_of(1, 3)
    place(rows, [1, 2])
    assert place(rows, [1, 2, 3, 4, 5, 6]) == [(0, False, 2, [3, 4, 5, 6])], "more than a step: another text"
    rows = rows_of(3)
    place(rows, [1, 2], [1, 2], names=["a", "b"])
    assert [one[0] for one in place(rows, [1, 2, 4], [1, 2, 3], names=["b", "a"])] == [1, 0]
    assert place(rows, [7], names=["a"])[0][:2] == (0, False), "a name can be reused"
    assert place(rows, [1, 2, 4, 5], names=["c"])[0][:2] == (2, False)
