"""Views of models: several threads decode with one pair, and the models are not modified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import build_draft, build_model
from small_drafters import small_drafter
from specstop.decode import Pair, Settings, Speculator, join, specstop_generate, with_engine
from specstop.decode.drafters import Drafter
from specstop.decode.loop import Request
from specstop.policies import load_policy
from tape import record_calls

NEW = 8
LOOPS: dict[str, Settings] = {
    "maxprob:0.4": Settings(0.7, NEW, verification="match"),
    "fixed:3": Settings(0.0, NEW, tree="2,2,1", verification="match"),
}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}


@pytest.fixture
def shared():
    target = build_model(attention_dropout=0.3)
    return join(target.train(), build_draft(target).train())


PROMPTS = [[3 + (7 * at + 5 * n) % 45 for at in range(1 + n)] for n in range(6)]


def assert_threads_agree(
    pair: Pair, policy: str = "fixed:3", drafter: Callable[[Pair], Drafter] | None = None, expected: Any = None
) -> list[tuple[int, ...]]:
    """Decode in four threads, two requests at a time, and compare the texts with those of one thread."""
    requests = [Request(prompt, key) for key, prompt in enumerate(PROMPTS * 2)]

    def decode(part: Sequence[Request]) -> list[tuple[int, ...]]:
        drafters = [drafter(pair)] if drafter else []
        speculator = Speculator(pair, load_policy(policy), LOOPS[policy], drafters=drafters, batch=3)
        return [text.tokens for text in speculator.run(part)]

    expected = expected or decode(requests)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(decode, [requests[at : at + 2] for at in range(0, len(requests), 2)]))
    assert [text for texts in results for text in texts] == expected
    return expected


@pytest.mark.parametrize("policy", LOOPS)
def test_threads_write_the_texts_of_one_thread(shared, policy):
    attention: Any = shared.target.model.layers[0].self_attn
    attention.forward = attention.forward  # some libraries replace it by a method
    assert_threads_agree(shared, policy)
    if policy == "fixed:3":
        fast = with_engine(join(copy.deepcopy(shared.target).float(), copy.deepcopy(shared.draft_model).float()))
        assert_threads_agree(fast, policy)
    assert shared.target.training and shared.draft_model.training


@pytest.mark.parametrize("kind", ["hydra", "layer"])
def test_drafters_on_the_target_are_shared(shared, kind):
    drafter = small_drafter(kind, shared)
    assert_threads_agree(shared, drafter=lambda pair: type(drafter)(pair, drafter._network))


def test_models_without_a_view_are_called_by_one_thread_at_a_time(shared):
    expected, layer = assert_threads_agree(shared), shared.target.model.layers[0]
    stock = layer.forward
    layer.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    assert_threads_agree(join(shared.target, shared.draft), expected=expected)
    assert all(module.training for module in shared.target.modules())


@pytest.mark.parametrize("records", [False, True])
def test_weights_and_adapters_that_change_between_two_texts_are_used(records, monkeypatch):
    peft = pytest.importorskip("peft")
    if records:
        record_calls(monkeypatch)
    target, prompt = build_model(), PROMPTS[2]
    draft, ids = build_draft(target), torch.tensor([prompt])
    options: Any = {"attention_mask": torch.ones_like(ids), **GREEDY}
    loop = Speculator(join(target, draft), load_policy("fixed:3"), Settings(0.0, NEW))

    def texts() -> list[int]:
        training = target.training
        out = target.generate(ids, custom_generate=specstop_generate, draft_model=draft, **options)
        assert list(loop.generate(prompt).tokens) == out[0, len(prompt) :].tolist() and target.training == training
        assert torch.equal(target.eval().generate(ids, **options), out)
        target.train(training)
        return out.tolist()

    results = [texts()]
    target.lm_head = copy.deepcopy(target.lm_head)
    with torch.no_grad():
        target.lm_head.weight.neg_()
    results.append(texts())
    target.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)
    target.train()  # with dropout
    results.append(texts())
    target.disable_adapters()
    results.append(texts())
    assert results[0] != results[1] != results[2] and results[3] == results[1]
