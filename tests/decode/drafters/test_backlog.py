"""The backlog of a round is what the drafter that drafts it really reads before its first proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import NEW
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.drafters import FallbackDrafter, LookupDrafter, ModelDrafter, SuffixDrafter, with_drafter
from specstop.decode.hooks import Hook
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.attention import Part
from specstop.decode.models.pair import Pair
from specstop.decode.records import Round
from specstop.decode.round_state import RoundState
from specstop.decode.settings import Settings
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

DEPTH = 3


class Spy(ModelDrafter):
    """Notes how many tokens it reads of each stream before its first proposals."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.read: dict[int, int] = {}

    def _part(self, round: RoundState, depth: int, stream: int, rows: Sequence[int]) -> Part:
        before = self._model.lengths[stream]
        part = super()._part(round, depth, stream, rows)
        if depth == 0:
            self.read[stream] = self._model.lengths[stream] - before + len(part.tokens)
        return part


class Lengths(StopPolicy):
    """Drafts random lengths, nothing at times, and verifies a part of them."""

    name, max_depth, first, trims = "lengths", DEPTH, 0, False

    def start(self, streams: int, keys: Array) -> State:
        return keys % 1000

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < (state * 7919 // 11 % (DEPTH + 1))[:, None]), state

    def observe(self, outcome: Any, state: State) -> State:
        return state + outcome.active * 13


class Watch(Hook):
    """Compares the backlog of each round with what was read in it."""

    def __init__(self, spy: Spy) -> None:
        self.spy, self.free, self.backlogs = spy, 0, list[int]()

    def on_round_end(self, round: RoundState) -> None:
        for stream, record in round.records.items():
            read = self.spy.read.pop(stream, 0)
            if record.drafted:
                assert record.backlog == read
                self.free += not read
                self.backlogs.append(record.backlog)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("tree", "temperature"), [(None, 0.0), (None, 0.7), ("2,2,1", 0.7)])
@pytest.mark.parametrize("three", [False, True])
def test_a_round_reads_its_backlog(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None, temperature: float, batch: int, three: bool
) -> None:
    spy = Spy(pair)
    other = FallbackDrafter(pair, LookupDrafter(pair), spy, 0.9) if three else spy
    drafter, watch = FallbackDrafter(pair, SuffixDrafter(pair), other, 0.4), Watch(spy)
    settings = Settings(temperature, NEW, DEPTH, tree=tree)
    run = Speculator(pair, Lengths(), settings, drafter=drafter, hooks=[watch], batch=batch)
    run.run([Request([*ids, *ids], key * 31) for key, ids in enumerate(prompt_ids)])
    assert watch.free > 3 and max(watch.backlogs) > 10 and len(set(watch.backlogs)) > 4


@pytest.mark.parametrize(
    ("collector", "spec"),
    [
        *((c, s) for c in ("live", "dense") for s in ("model", "suffix?confidence=0.4+model", "suffix+lookup+model")),
        ("dense", "suffix"),
    ],
)
def test_replay_charges_what_the_live_loop_charges(
    pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    profile: Profile,
    tmp_path: Any,
    spec: str,
    collector: str,
) -> None:
    """Rounds of a live trace replayed, and those of a dense one against the loop: backlogs, and so the modelled seconds."""
    alone, policy = with_drafter(pair, spec), Lengths()
    texts = [Prompt(p.id, f"{p.text} {p.text}", p.group) for p in prompts[:4]]
    options: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "verification": "match"}
    given = {"policy": policy} if collector == "live" else {}
    trace = collect(alone, texts, tmp_path / "trace", collector=collector, **options, **given)
    played = replay(trace_arrays(trace), policy.limited(DEPTH), profile)
    live: list[Round] = []
    run = Speculator(alone, policy, Settings(0.7, NEW, DEPTH, verification="match"))
    for ids, key in zip(prompt_ids, trace_arrays(trace).keys.tolist(), strict=False):
        live += run.generate([*ids, *ids], key).rounds
    assert played.anchor.tolist() == [r.anchor for r in live]
    assert played.backlog.tolist() == [r.backlog for r in live]
    columns = ([getattr(r, name) for r in live] for name in ("context", "drafted", "verified", "backlog", "decisions"))
    seconds = profile.round_seconds(*map(np.array, columns), profile.decision(policy.cost_name))
    np.testing.assert_allclose(played.price(profile).numpy(), seconds, rtol=1e-12)
