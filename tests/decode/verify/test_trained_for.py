"""Whether a profile was measured for what a run does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.verify.conditions import warn_if_unmeasured
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy


def told(profile: Profile | None, temperature: float, drafter: str, **more: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_unmeasured(profile, [FixedLength(2), FixedLength(3)], Settings(temperature, 8, 3, **more), drafter)
    assert all(issubclass(one.category, SpecstopWarning) for one in caught)
    return [str(one.message) for one in caught]


def test_a_profile_of_another_verification_is_told_of(profile: Profile) -> None:
    match = replace(profile, verification="match")
    (text,) = told(match, 0.7, "model", verification="block")  # once for both policies
    assert text.startswith("the profile timed rounds of the verification match, this run plays those of block")
    assert not told(match, 0.0, "model") and not told(match, 0.7, "model", verification="match")
    assert not told(match, 0.7, "model", tree="2,2", verification="rejection"), "chains alone are timed under a mode"
    assert not told(profile, 0.7, "model") and not told(None, 0.7, "suffix")


def test_a_profile_of_another_drafter_is_told_of(profile: Profile) -> None:
    assert not told(profile, 0.0, "suffix"), "costs that nobody measured"
    model = replace(profile, facts={"device": "cpu"})
    hydra = replace(profile, facts={"device": "cpu", "drafter": "hydra:some/where"})
    both = replace(profile, facts={"device": "cpu", "drafter": "suffix?confidence=0.3+medusa:here"})
    assert not told(model, 0.0, "model") and not told(hydra, 0.0, "hydra:else/where")
    assert not told(both, 0.0, "suffix?confidence=0.6+medusa:there")
    (text,) = told(hydra, 0.0, "model")
    assert "rounds of the drafter hydra, this run plays those of model" in text and "`drafter` model" in text
    assert told(model, 0.0, "suffix:file.txt") and told(both, 0.0, "suffix")
    assert not told(hydra, 0.0, "hydra:/models/llama+hydra-v2"), "a plus sign of the path"
    assert told(hydra, 0.0, "suffix:/a/b+hydra:/models/llama+hydra-v2")


def test_a_policy_that_hears_seconds_wants_them_for_all_that_it_drafts(pair: Pair, profile: Profile) -> None:
    bandit = load_policy("bandit?arms=fixed:1,fixed:8")
    with pytest.raises(
        InputError, match=r"observes the seconds of rounds and drafts up to 8 tokens, but the profile ends at 6"
    ):
        Speculator(pair, bandit, Settings(0.0, 8, 8), profile)
    assert Speculator(pair, bandit, Settings(0.0, 8, 6), profile).generate([5, 6, 7]).tokens
    assert Speculator(pair, FixedLength(8), Settings(0.0, 8, 8), profile).generate([5, 6, 7]).tokens, "it hears none"
