"""Drafts for all requests side by side are those of each request alone, whatever the engine does to its batch."""

from __future__ import annotations

import functools
import time
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from simulated_engine import Asked, K, Request, requests_of
from specstop.decode.drafters import find_drafter
from specstop.decode.engines import drafting as drafting_module
from specstop.decode.engines.drafting import Drafting, EngineDraft, Options
from specstop.decode.models.pair import Pair
from specstop.policies.contract import RoundOutcome, State, StopPolicy
from specstop.policies.errors import SpecstopWarning
from specstop.policies.registry import load_policy


@functools.cache
def likeliest(model: torch.nn.Module, text: tuple[int, ...]) -> tuple[int, float]:
    """Return the likeliest next token and its probability, by a forward without a cache; many tests ask for the same."""
    with torch.inference_mode():
        row = model(input_ids=torch.tensor([text])).logits[0, -1]
    return int(row.argmax()), float(row.softmax(-1).max())


def greedy(model: torch.nn.Module, text: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return the likeliest next tokens and their probabilities."""
    tokens, chances = tuple(text), []
    for _ in range(count):
        token, chance = likeliest(model, tokens)
        tokens, chances = (*tokens, token), [*chances, chance]
    return list(tokens[len(text) :]), chances


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


def of_model(pair: Pair, *args: object, **more: object) -> Asked:
    return Asked(find_drafter("model", pair), *args, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [True, False])
def test_each_draft_is_that_of_its_text_alone(
    pair: Pair, plain_pair: Pair, requests: list[Request], named: bool
) -> None:
    """Preempted, moved, aborted, trimmed, read in chunks: the draft never mistakes a request for another."""
    done: Counter[str] = Counter()
    for seed in range(3):
        tool = of_model(pair, load_policy("confidence:0.3"), seed, requests, named)
        tool.engine.run(tool.propose)
        done.update(tool.engine.counts)
        for text, draft in tool.asked[:: 5 if named else 9]:
            tokens, chances = greedy(plain_pair.draft_model, text, K)
            stop = next((j + 1 for j, chance in enumerate(chances) if chance < 0.3), K)
            assert draft == tokens[:stop]
        assert all(request.text == request.prompt + request.answer for request in tool.engine.finished)
    assert min(done.values()) > 3 and done["rounds"] > 100


def test_decisions_are_timed_apart_from_the_model(pair: Pair, requests: list[Request]) -> None:
    class Slow(StopPolicy):
        name, features, max_depth = "slow", ("top1",), 3

        def keep(self, step, state):
            time.sleep(1e-3)
            return step.alive, state

    tool = of_model(pair, Slow(), 0, requests[:1], True)
    tool.engine.run(tool.propose, most=6)
    spent = tool.drafting.spent
    assert spent.drafted > 6
    assert spent.drafted / 3 * 1e-3 <= spent.policy_s < spent.all_s - spent.model_s


def test_a_policy_hears_what_followed_of_each_draft(pair: Pair, requests: list[Request]) -> None:
    """Accepted and verified tokens are those that the engine has counted, round by round, for each request alone."""
    heard: list[tuple[int, int, int]] = []

    class Listening(StopPolicy):
        name, first, max_depth = "listening", 1, 3

        def start(self, streams: int, keys: np.ndarray) -> State:
            return np.asarray(keys).reshape(-1, 1).copy()

        def keep(self, step, state):
            return step.alive & (state % 3 + 1 > step.depth), state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            heard.extend(zip(state[:, 0].tolist(), outcome.verified.tolist(), outcome.accepted.tolist(), strict=True))
            return state

    tool = of_model(pair, Listening(), 5, requests, True)
    tool.engine.run(tool.propose)
    ended = [request for request in tool.engine.finished]
    expected = Counter()
    for request in ended:
        for _, draft, new in request.rounds[1:]:
            if draft:
                came = EngineDraft(0, 0, draft)
                came.set_outcome(new)
                expected[came.verified, came.accepted] += 1
    assert not expected - Counter((verified, accepted) for _, verified, accepted in heard)
    lengths = {key % 3 + 1 for key, *_ in heard}
    assert lengths == {1, 2, 3} and all(verified <= key % 3 + 1 for key, verified, _ in heard)


@pytest.mark.parametrize("first", [0, 1])
def test_a_state_that_grows_with_a_round_begins_anew_with_each(pair: Pair, requests: list[Request], first: int) -> None:
    """Rows rest at different depths of a round, and some rounds draft nothing: each is heard of before the next."""
    widths: list[tuple[int, int]] = []

    class Growing(StopPolicy):
        name, max_depth = "growing", 4

        def start(self, streams: int, keys: np.ndarray) -> State:
            return np.zeros((streams, 0)), np.asarray(keys).copy()

        def keep(self, step, state):
            known, rounds = state
            widths.append((step.depth, known.shape[1]))
            going = step.alive & (rounds % 5 >= step.depth)[:, None] & (rounds % 7 > 0)[:, None]
            return going, (np.concatenate([known, step.alive], 1), rounds)

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return np.zeros((len(state[0]), 0)), state[1] + 1

    policy = Growing()
    policy.first = first
    tool = of_model(pair, policy, 3, requests, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tool.engine.run(tool.propose)
    assert {depth for depth, _ in widths} == set(range(first, 4)) and tool.engine.counts["preempted"] > 0
    assert all(width == depth - first for depth, width in widths)
    assert first or any(not draft for _, draft in tool.asked)


def test_a_request_that_is_omitted_from_steps_keeps_its_state(pair: Pair) -> None:
    """Its rounds are counted alone, whatever other requests draft meanwhile."""

    class Counting(StopPolicy):
        name, first, max_depth = "counting", 0, K

        def start(self, streams: int, keys: np.ndarray) -> State:
            return np.zeros(streams, dtype=np.int64)

        def keep(self, step, state):
            return step.alive & (step.depth <= state)[:, None], state

        def observe(self, outcome: RoundOutcome, state: State) -> State:
            return state + outcome.active

    drafting = Drafting(find_drafter("model", pair), Counting(), Options(2, K, 128, pair.vocabulary))
    texts = {"a": [20, 21, 22], "b": [30, 31, 32]}
    lengths: dict[str, list[int]] = {"a": [], "b": []}
    for names in ("ab", "b", "ab", "b", "b", "a"):
        for name, draft in zip(names, drafting.propose([np.array(texts[n]) for n in names], list(names)), strict=True):
            lengths[name].append(len(draft))
            texts[name].append(40)
    assert lengths == {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5]}


def test_a_prefix_that_two_requests_of_a_row_have_in_common_is_read_once(pair: Pair, plain_pair: Pair) -> None:
    first, second = [*range(20, 40), 41], [*range(20, 36), 42, 43, 44]
    drafting = Drafting(find_drafter("model", pair), load_policy("fixed:3"), Options(1, K, 128, pair.vocabulary))
    backlogs = []
    for text in (first, second, second[:10]):
        assert drafting.propose([np.array(text)]) == [greedy(plain_pair.draft_model, text, 3)[0]]
        backlogs.append(drafting._requests.rows[0].draft.backlog)  # type: ignore[union-attr]
    assert backlogs == [21, 3, 1]


@pytest.mark.parametrize(
    ("draft", "new", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], (3, 3)),
        ([5, 6, 7], [5, 6, 9], (2, 3)),
        ([5, 6, 7], [4], (0, 3)),
        ([5, 6, 7], [5], (0, 0)),  # trimmed to nothing, and the target said the same
        ([5, 6, 7], [5, 6], (1, 1)),
        ([], [4], (0, 0)),
        ([5], [4, 5, 6], (0, 1)),  # steps in which nobody asked for a draft
    ],
)
def test_what_came_of_a_draft_is_what_follows(draft: list[int], new: list[int], expected: tuple[int, int]) -> None:
    came = EngineDraft(0, 0, draft)
    came.set_outcome(new)
    assert (came.accepted, came.verified) == expected


@pytest.mark.parametrize("where", ["start", "keep", "observe"])
def test_a_policy_that_fails_is_named_once_and_replaced(pair: Pair, requests: list[Request], where: str) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("seven")

    policy = type("Broken", (StopPolicy,), {where: broken, **({} if where == "keep" else {"keep": _all})})()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tool = of_model(pair, policy, 1, requests[:5], True, fallback=2)
        tool.engine.run(tool.propose)
    named = [str(w.message) for w in told if issubclass(w.category, SpecstopWarning)]
    assert len(named) == 1 and "seven" in named[0] and "fixed:2" in named[0]
    assert tool.drafting.policy.name == "fixed:2"
    assert {len(draft) for _, draft in tool.asked[-4:]} == {2}
    assert all(request.text == request.prompt + request.answer for request in tool.engine.finished)


def _all(self, step, state):
    return step.alive.copy(), state


def test_an_end_of_text_or_of_the_draft_s_room_ends_a_draft(pair: Pair, plain_pair: Pair) -> None:
    text = [20, 21, 22]
    tokens, _ = greedy(plain_pair.draft_model, text, K)
    for options, expected in (
        (Options(1, K, 128, pair.vocabulary, eos=(tokens[1],)), tokens[: tokens.index(tokens[1]) + 1]),
        (Options(1, K, len(text) + K, pair.vocabulary), tokens),
        (Options(1, K, len(text) + K - 1, pair.vocabulary), []),
    ):
        drafting = Drafting(find_drafter("model", pair), load_policy("fixed:5"), options)
        assert drafting.propose([np.array(text)]) == [expected]


def test_more_requests_than_rows_get_no_draft_and_no_length_none(pair: Pair) -> None:
    drafter, options = find_drafter("model", pair), Options(2, K, 128, pair.vocabulary)
    drafting = Drafting(drafter, load_policy("fixed:2"), options)
    assert [len(d) for d in drafting.propose([np.array([20, 21 + i]) for i in range(3)])] == [2, 2, 0]
    none = Drafting(drafter, load_policy("fixed:0"), options)
    assert none.propose([np.array([20, 21])]) == [[]]


def test_a_cache_that_grows_reads_its_texts_again(
    pair: Pair, plain_pair: Pair, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_module, "_INITIAL_TOKENS", 4)
    tool = of_model(pair, load_policy("fixed:3"), 2, requests[:6], True)
    tool.engine.run(tool.propose)
    assert len({(len(text) - 1).bit_length() for text, _ in tool.asked}) > 3
    for text, draft in tool.asked[::3]:
        assert draft == greedy(plain_pair.draft_model, text, 3)[0]
