"""Drafters of the loop inside an engine: they draft for each request what they draft for its text alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated_engine import Asked, K, Request, requests_of
from specstop.decode.drafters import Drafter, find_drafter
from specstop.decode.drafters.base import Proposal
from specstop.decode.drafters.lookup import LookupDrafter
from specstop.decode.engines import drafting
from specstop.decode.engines.drafters import load_engine_drafter
from specstop.decode.models.pair import Pair
from specstop.decode.round_state import RoundState, Rows
from specstop.decode.topology import chain
from specstop.policies.errors import InputError, PairError, SpecstopWarning
from specstop.policies.registry import load_policy
from torch import Tensor

LEAST = 0.4
DRAFTERS = ("model", "lookup", "lookup:1", "suffix", "suffix+model", "lookup?confidence=0.9+model")


@pytest.fixture(scope="module")
def requests(pair: Pair) -> list[Request]:
    return requests_of(pair)


def alone(drafter: Drafter, text: list[int], vocabulary: int) -> list[int]:
    """Return the draft of a text that is told all at once, ended after the first token of a lower chance than `LEAST`."""
    drafter.reserve(1, 128)
    drafter.begin(0)
    drafter.committed(0, text[:-1], None)
    none = np.zeros(1, dtype=np.int64)
    round = RoundState(chain(K), none == 0, none, none)
    round.tokens[0, 0] = text[-1]
    for depth in range(K):
        scores = drafter.propose(round, depth, [(0, [depth])]).dense(vocabulary)[0]
        if not torch.isfinite(scores).any():
            break
        round.tokens[0, depth + 1] = int(scores.argmax())
        if scores.softmax(-1).max() < LEAST:
            break
    return [token for token in round.tokens[0, 1:].tolist() if token >= 0]


@pytest.mark.parametrize("spec", DRAFTERS)
def test_each_draft_is_that_of_its_text_alone(pair: Pair, requests: list[Request], spec: str) -> None:
    """Preempted, moved, aborted, trimmed, read in chunks: the drafter never mistakes a request for another."""
    done, known = Counter[str](), find_drafter(spec, pair)
    for seed in range(2):
        tool = Asked(find_drafter(spec, pair), load_policy(f"confidence:{LEAST}"), seed, requests, named=bool(seed))
        tool.engine.run(tool.propose)
        done.update(tool.engine.counts)
        for text, draft in tool.asked[:: 2 if spec == "lookup" else 7]:
            assert draft == alone(known, text, pair.vocabulary)
        assert all(request.text == request.prompt + request.answer for request in tool.engine.finished)
        assert len({len(draft) for _, draft in tool.asked}) > 2
    assert min(done.values()) > 1 and done["rounds"] > 40


@pytest.mark.parametrize("spec", ["suffix", "suffix+model"])
def test_a_drafter_that_is_given_more_room_is_told_its_texts_again(
    pair: Pair, requests: list[Request], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "_INITIAL_TOKENS", 4)
    tool = Asked(find_drafter(spec, pair), load_policy(f"confidence:{LEAST}"), 2, requests[:6], named=True)
    tool.engine.run(tool.propose)
    known = find_drafter(spec, pair)
    assert len({(len(text) + K).bit_length() for text, _ in tool.asked}) > 2
    for text, draft in tool.asked[::3]:
        assert draft == alone(known, text, pair.vocabulary)


def test_earlier_texts_are_drafted_from_if_asked(pair: Pair, requests: list[Request]) -> None:
    """One request after the other, the same text twice: the second time nearly all of it is a draft."""
    twice, rounds = [requests[0], Request("again", requests[0].prompt, requests[0].answer)], {}
    for keep in (0, 1):
        tool = Asked(find_drafter(f"suffix?keep={keep}", pair), load_policy(f"fixed:{K}"), 0, twice, named=True, rows=1)
        tool.engine.places, tool.engine.gentle = 1, True
        tool.engine.run(tool.propose)
        rounds[keep] = [len(request.rounds) for request in tool.engine.finished]
    assert rounds[1][0] == rounds[0][0] == rounds[0][1] and rounds[1][1] < rounds[0][1]


class Breaking(LookupDrafter):
    """Fails at its `left`-th call after it was made, and must not be called again."""

    left = 0

    def counted(self) -> None:
        assert self.left > 0, "a drafter that has failed was called again"
        self.left -= 1
        if not self.left:
            raise RuntimeError("out of words")

    def begin(self, stream: int) -> None:
        self.counted()
        super().begin(stream)

    def committed(self, stream: int, tokens: Sequence[int], states: Tensor | None) -> None:
        self.counted()
        super().committed(stream, tokens, states)

    def backlog(self) -> Any:
        self.counted()
        return super().backlog()

    def propose(self, round: RoundState, depth: int, rows: Rows) -> Proposal:
        self.counted()
        return super().propose(round, depth, rows)


@pytest.mark.parametrize("at", range(20, 26))
def test_an_engine_outlives_its_drafter(pair: Pair, requests: list[Request], at: int) -> None:
    """Whatever call fails, it is said once, and the requests are finished without drafts."""
    drafter = Breaking(pair)
    drafter.left = at
    tool = Asked(drafter, load_policy(f"confidence:{LEAST}"), 0, requests, named=True)
    with pytest.warns(SpecstopWarning, match=r"the drafter failed \(.*out of words.*\); nothing is drafted") as told:
        tool.engine.run(tool.propose)
    assert len(told) == 1 and drafter.left == 0
    assert all(request.text == request.prompt + request.answer for request in tool.engine.finished)
    lengths = [len(draft) for _, draft in tool.asked]
    assert any(lengths) and not any(lengths[-40:])
    with pytest.raises(InputError, match=r"the drafter failed \(.*out of words.*\); nothing was recorded"):
        tool.drafting.check_failed()  # as `collect` and `profile` do


def load(drafter: str, folder: Path, draft: str = "") -> Drafter:
    return load_engine_drafter(drafter, draft, str(folder / "target"), torch.device("cpu"), torch.float64, 48)


def test_drafters_are_made_without_the_engine_s_target(pair_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "seen.txt").write_text("a b c", encoding="utf-8")
    none = np.zeros(2, dtype=np.int64)
    for spec in ("lookup", "suffix", f"suffix:{tmp_path / 'seen.txt'}", "suffix+model", "model"):
        drafter = load(spec, pair_folder, str(pair_folder / "draft") if spec.endswith("model") else "")
        drafter.reserve(2, 64)
        drafter.begin(1)
        drafter.committed(1, [20, 21], None)
        round = RoundState(chain(K), none == 0, none, none)
        round.tokens[1, 0] = 20
        assert drafter.propose(round, 0, [(1, [0])]).dense(48).shape == (1, 48)
        assert (drafter.readable < 1 << 20) == spec.endswith("model")


def test_a_draft_model_alone_needs_no_files_of_the_target(pair_folder: Path, tmp_path: Path) -> None:
    draft = str(pair_folder / "draft")
    load_engine_drafter("model", draft, str(tmp_path), torch.device("cpu"), torch.float64, 48)


@pytest.mark.parametrize("spec", ["medusa:heads", "suffix+ctc:heads"])
def test_drafters_on_the_target_s_states_are_refused_by_name(pair_folder: Path, spec: str) -> None:
    with pytest.raises(InputError, match=f"drafter {spec.replace('+', '.')}: it reads the target's hidden"):
        load(spec, pair_folder)


def test_a_target_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="target"):
        load("lookup", tmp_path)
