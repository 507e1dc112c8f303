"""Policies that break the contract do not change the text; invalid arguments are refused by name."""

from __future__ import annotations

import functools
import math
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW, build_model
from specstop.decode.benchmark import bench
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import join
from specstop.decode.plain import plain_texts
from specstop.decode.run import decode
from specstop.decode.topology import parse_tree
from specstop.decode.verify.noise import stream_key
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.storage import save_policy
from transformers import MaxLengthCriteria


class Plugin(StopPolicy):
    """Drafts two tokens; a fault replaces one of its methods."""

    name, features, max_depth = "plugin", ("top1",), 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < 2), state


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("inside a plugin")


def leave(*args: Any) -> Any:
    raise SystemExit(0)


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {  # tests of `PolicyHost` cover all invalid answers
    **{f"raises in {method}": {method: fail} for method in ("keep", "start", "observe", "select")},
    "exits": {"keep": leave},
    "NaN": {"keep": lambda self, step, state: (step.features[..., 0] * math.nan, state)},
    "fails at depth 2": {"keep": lambda self, step, state: fail() if step.depth == 2 else (step.alive, state)},
    "selects a wrong shape": {"select": lambda self, tree, state: np.ones((1, 99), dtype=bool)},
}
HARMLESS: dict[str, dict[str, Callable[..., Any]]] = {
    "changes its arguments": {
        "keep": lambda self, step, state: (np.logical_not(step.alive, step.alive), step.features.fill(0))
    },
    "revives stopped branches": {"keep": lambda self, step, state: (np.ones_like(step.alive), state)},
    "selects orphans": {"select": lambda self, tree, state: tree.depth != 1},
    "changes the tree": {"select": lambda self, tree, state: np.add(tree.tokens, 7, tree.tokens) > 0},
}


@pytest.fixture(scope="module")
def plain(pair, prompt_ids):
    return plain_texts(pair, prompt_ids[:3], [stream_key(0, f"p{i}") for i in range(3)], NEW, 0.7).tokens


@pytest.mark.parametrize("name", [*FAULTS, *HARMLESS])
@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_a_policy_that_fails_is_replaced_with_one_warning_and_the_text_stays(pair, prompt_ids, plain, name, tree):
    policy: StopPolicy = type("Broken", (Plugin,), (FAULTS | HARMLESS)[name])()
    settings = Settings(0.7, NEW, 4, fallback=1, tree=tree, verification="match")
    speculator = Speculator(pair, policy, settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = [list(speculator.generate(p, stream_key(0, f"p{i}")).tokens) for i, p in enumerate(prompt_ids[:3])]
    assert texts == plain
    messages = [str(w.message) for w in caught if issubclass(w.category, SpecstopWarning)]
    if name in HARMLESS:
        assert not messages and speculator.policy.name == "plugin"
        return
    (message,) = messages
    assert "plugin" in message and "fixed:1" in message and next(iter(FAULTS[name])) in message
    assert speculator.policy.name == "fixed:1"
    speculator.reset()
    assert speculator.policy.name == "plugin", "alternating runs call it again"


def test_ctrl_c_in_a_policy_stops_the_program(pair, prompt_ids):
    policy = type("Interrupted", (Plugin,), {"keep": lambda *args: signal.raise_signal(signal.SIGINT)})()
    with pytest.raises(KeyboardInterrupt):
        Speculator(pair, policy, Settings(0.0, NEW, 4)).generate(prompt_ids[3])


def test_a_prompt_must_have_tokens_and_fit_the_models(pair):
    speculator = Speculator(pair, FixedLength(4), Settings(max_new_tokens=28))
    assert speculator.generate([7] * 100).tokens
    short = join(pair.target, build_model(max_position_embeddings=64))
    for used, length, noun in ((pair, 101, "target .*128"), (short, 40, "draft .*64"), (pair, 0, "empty")):
        with pytest.raises(InputError, match=noun):
            Speculator(used, FixedLength(4), Settings(max_new_tokens=28)).generate([7] * length)


def test_a_policy_that_reads_unknown_hidden_states_is_refused(pair):
    policy = FixedLength(2)
    policy.hidden = ("draft_hiden",)
    with pytest.raises(PolicyError, match=r"draft_hiden.*did you mean 'draft_hidden'"):
        Speculator(pair, policy)


INVALID = [
    ("temperature", -1.0), ("temperature", math.nan), ("temperature", 1e300), ("temperature", True), ("temperature", "hot"),
    ("max_new_tokens", 0), ("max_new_tokens", 2.5), ("max_depth", -1), ("max_depth", 10**9), ("fallback", -1),
    ("verification", "macth"), ("tree", "2,x"), ("tree", ""), ("drift", "on"), ("stops", ("w9",)), ("sampling", None),
    ("stops", "w9"), ("stops", MaxLengthCriteria(9)), ("tree", 5), ("tree", [4, 2]), ("tree", parse_tree("2,2")),
    ("tree", "9" * 5000), ("tree", "chain:" + "9" * 5000), ("tree", "parents:-" + "9" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_settings_are_validated_at_construction(name, value):
    with pytest.raises(InputError, match=name) as caught:
        Settings(**{name: value})
    assert "--" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_is_one_prompt(pair, prompts):
    settings, text = Settings(0.0, 8), prompts[5].text
    one = decode(pair, text, FixedLength(3), settings=settings)
    assert decode(pair, text, FixedLength(3), settings=settings, ids="a").tokens == one.tokens
    for several in ([text], prompts[5:6]):
        assert decode(pair, several, FixedLength(3), settings=settings)[0].tokens == one.tokens
    for value in ([7, 8, 9], np.array([7, 8]), torch.tensor([7, 8]), text.encode(), [text.encode()], Path("a"), None):
        with pytest.raises(InputError, match=r"^prompts: "):
            decode(pair, value, FixedLength(3), settings=settings)
    with pytest.raises(InputError, match=r"^ids: "):
        decode(pair, [text, text], FixedLength(3), settings=settings, ids=["a"])


def test_where_token_ids_are_expected_a_text_is_refused(pair):
    text: Any = "w7 w9"
    speculator = Speculator(pair, FixedLength(2), Settings(0.0, 4))
    plain = functools.partial(plain_texts, pair, keys=[0], max_new_tokens=4)
    for function in (speculator.run, lambda one: speculator.run([Request(one)]), speculator.generate, plain):
        with pytest.raises(InputError, match="expected"):
            function(text)


def test_a_policy_may_be_a_spec_or_a_folder(pair, prompts, prompt_ids, learned, tmp_path):
    settings = Settings(0.0, 8)
    expected = decode(pair, prompts[5].text, FixedLength(3), settings=settings)
    named = decode(pair, prompts[5].text, "fixed:3", settings=settings)
    assert (named.tokens, len(named.rounds)) == (expected.tokens, len(expected.rounds))
    save_policy(learned, tmp_path / "policy")
    for place in (tmp_path / "policy", str(tmp_path / "policy")):
        with pytest.warns(SpecstopWarning, match="temperature"):
            assert decode(pair, prompts[5].text, place, settings=settings).tokens == expected.tokens
    for one in (prompts[5].text, prompts[5:6], prompt_ids[5:6]):
        assert [line.name for line in bench(pair, one, "fixed:2", settings=settings)] == ["plain", "fixed:2"]
    with pytest.raises(PolicyError, match=r"fixd:3.*did you mean"):
        decode(pair, "w7", "fixd:3")
