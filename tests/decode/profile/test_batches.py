"""The profile of batches: known costs on a made-up clock come back exactly, and rounds cost what they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from specstop.decode.hooks import Timer
from specstop.decode.model_source import ModelSource
from specstop.decode.models.attention import Part
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.decode.profile.scripts import TWICE, BatchScript, card_at
from specstop.policies.contract import DraftStep
from specstop.policies.costs import BatchCosts
from specstop.policies.errors import InputError
from specstop.policies.profile import Profile
from torch import Tensor

DEPTH, SIZES = 4, (2, 3)
PROMPTS = [[6 + (7 * i + j) % 40 for j in range(12)] for i in range(5)]
DRAFT, DRAFT_TOKEN, TARGET, STREAM, TOKEN, ROUND = 1e-3, 5e-5, 4e-3, 2e-4, 1e-4, 3e-4
NEAR = 1e-6  # sums and differences of a clock near 1 s


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture(scope="module")
def clock(pair: Pair, patched: pytest.MonkeyPatch) -> list[float]:
    """A clock that only packed calls and commits move: verifications by streams and tokens, drafts by tokens."""
    now = [0.0]
    packed, alone, commit = CachedModel._read_packed, CachedModel._read_alone, ModelSource.commit

    def tick(self: CachedModel, parts: Sequence[Part]) -> None:
        tokens = sum(len(part.tokens) for part in parts)
        target = self.original is pair.target
        now[0] += TARGET + STREAM * len(parts) + TOKEN * tokens if target else DRAFT + DRAFT_TOKEN * tokens

    def timed_packed(self: CachedModel, parts: Sequence[Part]) -> Tensor:
        tick(self, parts)
        return packed(self, parts)

    def timed_alone(self: CachedModel, part: Part) -> Tensor:
        tick(self, [part])
        return alone(self, part)

    def timed_commit(self: ModelSource, *args: object) -> object:
        now[0] += ROUND
        return commit(self, *args)

    patched.setattr(Timer, "now", lambda self: now[0])
    patched.setattr(CachedModel, "_read_packed", timed_packed)
    patched.setattr(CachedModel, "_read_alone", timed_alone)
    patched.setattr(ModelSource, "commit", timed_commit)
    return now


@pytest.fixture(scope="module")
def profile(pair: Pair, clock: list[float]) -> Profile:
    return measure_profile(
        pair,
        PROMPTS,
        depth=DEPTH,
        new_tokens=60,
        effort=Effort(repetitions=2),
        batch=SIZES,
        progress=lambda *call: None,
    )


def costs_of(profile: Profile) -> BatchCosts:
    assert profile.batch is not None
    return profile.batch


def test_known_costs_are_found_again(profile: Profile, tmp_path: Path) -> None:
    costs = costs_of(profile)
    assert costs.sizes == (1, *SIZES), "and one text by itself, with which batches end"
    for context in (costs.low.context, costs.high.context):
        for size in SIZES:
            tokens = np.array([n for n, _ in costs.low.verify_s[size]])
            assert tokens[0] == size and tokens[-1] == size * (1 + DEPTH)
            found = profile.verify_s(size, tokens, context)
            assert found == pytest.approx(TARGET + STREAM * size + TOKEN * tokens + ROUND, rel=NEAR)
        drafting = np.array([1, 2, 3])
        assert profile.draft_s(drafting, context) == pytest.approx(DRAFT + DRAFT_TOKEN * drafting, rel=NEAR)
        assert (profile.first_draft_s(drafting, context) >= profile.draft_s(drafting, context)).all(), "it reads more"
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again.batch == costs and again.noise == profile.noise
    drawn = costs_of(again.resampled(np.random.default_rng(0)))
    assert dict(drawn.low.verify_s[3]) == pytest.approx(dict(costs.low.verify_s[3])), "every repetition said the same"


def test_sizes_that_are_none_are_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match="batch: expected a whole number"):
        measure_profile(pair, PROMPTS, depth=1, batch=(0, 2))


def test_the_script_lets_every_stream_draft_every_length() -> None:
    script = BatchScript(3, DEPTH)
    assert set(script.deck) == {(0, 0), *((r, n) for r in (1, 2, 3) for n in (1, 2, 3, 4))}
    assert set(BatchScript(1, 7).deck) == {(0, 0), *((1, n) for n in range(1, 8))}, "alone every length"
    assert max(n for _, n in BatchScript(8, 100).deck) == 100, "the last one of the profile"
    state = script.start(3, np.full(3, 5))
    one = np.ones((3, 1), dtype=bool)
    seen: set[tuple[int, int]] = set()
    for number in range(4 * len(script.deck)):  # up and down
        state = (state[0], np.full(3, number))
        lengths = np.zeros(3, dtype=int)
        for depth in range(DEPTH):
            step = DraftStep(
                depth, one, one.astype(np.int64), np.zeros((3, 1, 0), np.float32), {}, np.zeros(3, np.int64)
            )
            lengths += script.keep(step, state)[0][:, 0]
        drafting = lengths[lengths > 0]
        assert len(set(drafting.tolist())) <= 1, "all that draft go equally deep"
        seen.add((len(drafting), int(lengths.max())))
    assert seen == set(script.deck)


def test_rounds_of_a_batch_come_in_the_order_of_what_they_draft() -> None:
    deck = BatchScript(3, DEPTH).deck
    drafted = [some * length for some, length in deck]
    assert drafted == sorted(drafted)
    for key in (0, 1, 77):
        cards = [card_at(len(deck), key, number) for number in range(0, 8 * len(deck), TWICE)]
        assert all(card_at(len(deck), key, n + 1) == card_at(len(deck), key, n) for n in range(0, 40, TWICE)), "twice"
        assert {abs(a - b) for a, b in pairwise(cards)} == {1}
        assert set(cards) == set(range(len(deck)))
    period = 2 * (len(deck) - 1)
    starts = Counter(card_at(len(deck), key, 0) for key in range(period))
    assert starts == {card: 1 if card in (0, len(deck) - 1) else 2 for card in range(len(deck))}, "keys begin all over"
    assert card_at(1, 5, 3) == 0
