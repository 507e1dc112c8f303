"""Outputs of models: logits that are not finite, and hidden states that a policy reads.

Such logits of the target end the run with one error, those of the draft do not change the text. tests/collect compares the
states of the live loop with those of whole forward passes, and tests/train/replay the decisions of policies that read them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from contract_policies import ReadsDraftStates
from small_drafters import small_drafter
from specstop.decode import LookupDrafter, Pair, Settings, Speculator, plain_texts
from specstop.decode.loop import Request
from specstop.policies import FixedLength, PairError, PolicyError
from tape import record_calls
from transformers import PreTrainedModel

NEW, LATER = 12, 6
MODES = {
    "match": (0.0, None), "match, sampled": (0.7, None), "match, a tree": (0.7, "3,2,1"), "rejection": (0.7, None),
    "rejection, a tree": (1.0, "2,2"), "rejection_replace": (0.7, "2,2"), "block": (0.7, None), "typical": (0.7, None),
}  # fmt: skip
BAD = {"NaN": (math.nan, slice(7, 8)), "inf": (math.inf, slice(7, 8)), "all at -inf": (-math.inf, slice(None))}


def spoiled(model: PreTrainedModel, position: int, value: float, tokens: slice = slice(7, 8)) -> PreTrainedModel:
    """Return a copy whose logits after `position` and later are `value` for some tokens."""
    broken = copy.deepcopy(model)

    def spoil(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        late = kwargs["position_ids"][:, -out.logits.shape[1] :] >= position
        out.logits[..., tokens] = out.logits[..., tokens].masked_fill(late[..., None], value)
        return out

    broken.register_forward_hook(spoil, with_kwargs=True)
    return broken


def spoiled_pair(pair: Pair, role: str, *arguments: Any) -> Pair:
    return dataclasses.replace(pair, **{role: spoiled(getattr(pair, role), *arguments)})


def decode(pair: Pair, prompt: list[int], settings: Settings) -> list[int]:
    return list(Speculator(pair, FixedLength(3), settings).generate(prompt, 5).tokens)


def is_refused(role: str) -> Any:
    return pytest.raises(PairError, match=rf"^the {role}'s logits are not finite: [^\n]*$")


@pytest.mark.parametrize(
    ("mode", "value"),
    [*(("match", value) for value in BAD), *((mode, list(BAD)[at % 3]) for at, mode in enumerate(MODES) if at)],
)
def test_values_of_the_target_end_the_run_and_those_of_the_draft_do_not_change_the_text(pair, prompt_ids, mode, value):
    prompt, (temperature, tree), name = prompt_ids[3], MODES[mode], mode.partition(",")[0]
    settings = Settings(temperature, NEW, ignore_eos=True, tree=tree, verification=name)
    late = len(prompt) + LATER
    for role, position in (("target", 0), ("target", late), ("draft", 0)):
        with is_refused(role):
            decode(spoiled_pair(pair, role, position, *BAD[value]), prompt, settings)
    with is_refused("target"):
        broken = spoiled_pair(pair, "target", 12, *BAD[value])
        plain_texts(broken, prompt_ids[:2], [1, 2], 20, settings.temperature, ignore_eos=True)
    assert 7 not in decode(spoiled_pair(pair, "target", 0, -math.inf), prompt, settings), "a model may ban a token"
    later = spoiled_pair(pair, "draft", late, *BAD[value])
    if not mode.startswith(("match", "typical")):  # the probabilities of the draft matter
        with is_refused("draft"):
            decode(later, prompt, settings)
        return
    text = decode(later, prompt, settings)
    assert len(text) == NEW and (mode == "typical" or text == decode(pair, prompt, settings))


@pytest.mark.parametrize("kind", ["model", "layer", "ctc", "recorded"])
def test_the_next_texts_of_a_loop_are_correct(plain_pair, prompt_ids, kind, monkeypatch):
    """Values of a broken text remain in the caches behind masks, where zero times NaN is NaN."""
    if kind == "recorded":
        record_calls(monkeypatch)
    target = copy.deepcopy(plain_pair.target)
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = math.nan
    pair = dataclasses.replace(plain_pair, target=target)
    good = [Request([token for token in ids[:4] if token != 7], key) for key, ids in enumerate(prompt_ids[:2])]
    expected = None
    for _ in range(2):  # if calls are recorded, the second loop takes over the memory of the first
        drafters = [] if kind in ("model", "recorded") else [small_drafter(kind, pair)]
        speculator = Speculator(pair, FixedLength(3), Settings(0.0, NEW, ignore_eos=True), batch=2, drafters=drafters)
        for _ in range(2):
            texts = [text.tokens for text in speculator.run(good)]
            expected = expected or texts
            assert texts == expected
            with pytest.raises(PairError):
                speculator.run([Request([*range(8, 14), *[7] * 9], key) for key in range(2)])
        del speculator


def test_states_that_do_not_fit_are_refused(plain_pair):
    trimming = Speculator(plain_pair, ReadsDraftStates(), Settings(0.7, NEW, tree="3,2,1", verification="rejection"))
    assert trimming.generate([5, 6]).tokens, "a policy that trims may read states of the draft"
    for drafter in (LookupDrafter(plain_pair), small_drafter("ctc", plain_pair)):  # a path of CTC has no state
        with pytest.raises(PolicyError, match=f"reads-draft-states: .*draft_hidden.*{type(drafter).__name__}"):
            Speculator(plain_pair, ReadsDraftStates(), drafters=[drafter])
    policy = ReadsDraftStates()
    policy.sizes = {"draft_hidden": 17}  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="draft_hidden of 17 numbers"):
        Speculator(plain_pair, policy)
