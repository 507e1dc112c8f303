"""Loops call views of a model: several threads decode with one pair, and the caller's models stay as they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, build_draft, build_model
from small_drafters import small_drafter
from small_models import table
from specstop.decode import Settings, Speculator, specstop_generate
from specstop.decode.drafters import Drafter
from specstop.decode.loop import Request
from specstop.decode.models.device import without_cudnn
from specstop.decode.models.pair import Pair, join, load_pair, with_engine
from specstop.decode.models.view import open_view
from specstop.policies import load_policy
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

TEXTS, NEW = 50, 8  # 50 of each loop

LOOPS = [
    ("fixed:4", None, 0.0, 1),
    ("maxprob:0.4", None, 0.7, 3),
    ("fixed:3", "2,2,1", 0.0, 3),
    ("online:0.3", "fork:2x3", 0.8, 1),
]


@pytest.fixture(scope="module")
def shared() -> Pair:
    target = build_model(attention_dropout=0.3)
    return join(target.train(), build_draft(target).train())


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (2 + n % 9,), generator=generator).tolist() for n in range(count)]


def decode(
    pair: Pair,
    requests: Sequence[Request],
    loop: tuple[str, str | None, float, int] = LOOPS[0],
    drafter: Callable[[Pair], Drafter] | None = None,
) -> list[tuple[int, ...]]:
    policy, tree, temperature, batch = loop
    settings, made = (
        Settings(temperature, NEW, tree=tree, verification="match"),
        None if drafter is None else drafter(pair),
    )
    speculator = Speculator(pair, load_policy(policy), settings, drafter=made, batch=batch)
    return [text.tokens for text in speculator.run(requests)]


def in_threads(threads: int, work: Callable[[Sequence[Request]], list[Any]], requests: Sequence[Request]) -> list[Any]:
    """Return what `work` returns of all requests, done by several threads, five requests at a time."""
    texts: list[Any] = [None] * len(requests)
    failures: list[BaseException] = []

    def run(first: int) -> None:
        own = range(first, len(requests), threads)
        try:
            for at in range(0, len(own), 5):
                part = own[at : at + 5]
                for number, text in zip(part, work([requests[number] for number in part]), strict=True):
                    texts[number] = text
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
    return texts


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: f"{loop[0]}-{loop[1]}-{loop[2]}-{loop[3]}")
def test_threads_write_the_texts_of_one_thread(shared: Pair, loop: tuple[str, str | None, float, int]) -> None:
    requests = [Request(prompt, key) for key, prompt in enumerate(prompts(TEXTS))]
    expected = decode(shared, requests, loop)
    for threads in (2, 4, 8):
        assert in_threads(threads, lambda some: decode(shared, some, loop), requests) == expected
    assert shared.target.training and shared.draft_model.training


@pytest.mark.parametrize(
    ("kind", "attention", "engine"),
    [
        ("llama", "sdpa", "compact"), ("llama", "sdpa", "packed"), ("llama", "eager", "plain"), ("gpt2", "sdpa", "packed"),
        ("gemma2", "eager", "plain"), ("gemma3", "sdpa", "plain"),
    ],
)  # fmt: skip
def test_models_of_all_kinds_and_engines_are_shared(kind: str, attention: str, engine: str) -> None:
    target = table.build(kind, torch.float32, attention)
    pair = with_engine(join(target, table.noisy(target)), engine)
    requests = [Request(prompt) for prompt in prompts(24)]
    expected = decode(pair, requests, LOOPS[2])
    assert in_threads(4, lambda some: decode(pair, some, LOOPS[2]), requests) == expected


@pytest.mark.parametrize("kind", ["medusa", "hydra", "layer", "ctc"])
def test_drafters_on_the_target_are_shared(shared: Pair, kind: str) -> None:
    requests = [Request(prompt) for prompt in prompts(24)]
    network = small_drafter(kind, shared)._network
    build = type(small_drafter(kind, shared))
    expected = decode(shared, requests, LOOPS[2])
    assert (
        in_threads(4, lambda some: decode(shared, some, LOOPS[2], lambda pair: build(pair, network)), requests)
        == expected
    )


def test_the_model_serves_its_owner_meanwhile(shared: Pair) -> None:
    """Packed calls attend by a backend of their own; the owner's calls at the same time do not."""
    ids, ended, failures = torch.tensor([prompts(1)[0]]), threading.Event(), []
    model = copy.deepcopy(shared.target).eval()
    pair = join(model, copy.deepcopy(shared.draft_model))

    @torch.no_grad()
    def own() -> None:
        expected = model(ids).logits
        while not ended.is_set():
            try:
                if model.config._attn_implementation != "sdpa" or not torch.equal(model(ids).logits, expected):
                    failures.append("other logits")
            except Exception as error:
                failures.append(repr(error))

    thread = threading.Thread(target=own)
    thread.start()
    try:
        decode(pair, [Request(prompt) for prompt in prompts(60)], LOOPS[2])
    finally:
        ended.set()
        thread.join()
    assert not failures


def test_a_view_shares_weights_and_nothing_that_is_set(shared: Pair) -> None:
    model = shared.target
    view, _ = open_view(model)
    views = dict(view.named_modules())
    for name, module in model.named_modules():
        assert type(views[name]) is type(module) and views[name] is not module
        assert module.training and not views[name].training
    for own, theirs in zip(view.parameters(), model.parameters(), strict=True):
        assert own is theirs
    assert view.model.layers[0].self_attn.config is view.config is not model.config
    view.config._attn_implementation = "eager"
    view.model.register_buffer("more", torch.zeros(1))
    view.register_forward_hook(lambda *_: None)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.model, "more") and not model._forward_hooks


def test_layers_that_are_replaced_between_two_texts_are_called() -> None:
    target = build_model()
    loop = Speculator(join(target, build_draft(target)), load_policy("fixed:3"), Settings(0.0, NEW))
    prompt = prompts(1)[0]
    before = loop.generate(prompt).tokens
    target.lm_head = copy.deepcopy(target.lm_head)
    with torch.no_grad():
        target.lm_head.weight.neg_()
    after = loop.generate(prompt).tokens
    assert after != before
    assert list(after) == table.plain(target, prompt, NEW)


def test_adapters_that_are_added_between_two_texts_are_called() -> None:
    peft = pytest.importorskip("peft")
    target = build_model()
    draft, prompt = build_draft(target), prompts(1)[0]
    ids = torch.tensor([prompt])
    options: Any = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
    }

    def ours() -> Tensor:
        made: Tensor = target.generate(ids, custom_generate=specstop_generate, draft_model=draft, **options)
        return made

    loop = Speculator(join(target, draft), load_policy("fixed:3"), Settings(0.0, NEW))
    first = ours()
    assert list(loop.generate(prompt).tokens) == first[0, len(prompt) :].tolist()
    target.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)
    target.train()  # as in training, where its dropout is on
    adapted = ours()
    assert target.training
    target.eval()
    assert torch.equal(adapted, target.generate(ids, **options)) and not torch.equal(adapted, first)
    assert list(loop.generate(prompt).tokens) == adapted[0, len(prompt) :].tolist()
    target.disable_adapters()
    assert torch.equal(ours(), first)
    assert list(loop.generate(prompt).tokens) == first[0, len(prompt) :].tolist()


def replaced_forward(model: PreTrainedModel) -> None:
    stock = model.model.layers[0].forward
    model.model.layers[0].forward = lambda *args, **kwargs: stock(*args, **kwargs)


def hooked(model: PreTrainedModel) -> None:
    """Have accelerate fetch the weights for each call, and let go of them after it."""
    hooks, device = pytest.importorskip("accelerate.hooks"), torch.device("cpu")
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    hooks.attach_align_device_hook(
        model, execution_device=device, offload=True, weights_map=weights, offload_buffers=False
    )
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(device, io_same_device=True), append=True)


@pytest.mark.filterwarnings("ignore:.*neither packed nor recorded")
@pytest.mark.parametrize("bind", [replaced_forward, hooked])
def test_models_that_are_bound_to_themselves_are_called_by_one_thread_at_a_time(
    shared: Pair, bind: Callable[[PreTrainedModel], None]
) -> None:
    pair = join(copy.deepcopy(shared.target), shared.draft)
    requests = [Request(prompt, key) for key, prompt in enumerate(prompts(24))]
    expected = [decode(pair, requests, loop) for loop in LOOPS[1:3]]
    bind(pair.target)
    pair = join(pair.target, shared.draft)
    for loop, texts in zip(LOOPS[1:3], expected, strict=True):
        assert in_threads(4, lambda some, loop=loop: decode(pair, some, loop), requests) == texts  # type: ignore[misc]
    assert all(module.training for module in pair.target.modules())


def test_a_bound_method_goes_on_with_the_view() -> None:
    model = build_model()
    attention: Any = model.model.layers[0].self_attn
    attention.forward = attention.forward  # as libraries do that replace it by a method of their own
    view, _ = open_view(model)
    layer: Any = view.model.layers[0].self_attn
    assert layer.forward.__self__ is layer


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.tensors.append(value)

    def end(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing")
def test_a_generated_text_is_an_ordinary_tensor(shared: Pair) -> None:
    target: Any = shared.target
    target.gradient_checkpointing_enable()
    target.enable_input_require_grads()
    streamer = Kept()
    ids = torch.tensor([prompts(1)[0]])
    made = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0,
        custom_generate=specstop_generate, draft_model=shared.draft, text_streamer=streamer,
    )  # fmt: skip
    assert torch.equal(torch.cat([part.flatten() for part in streamer.tensors]), made[0])
    assert not any(tensor.is_inference() for tensor in streamer.tensors)
    target(made, labels=made).loss.backward()
    made[0, 0] = 1
    target.zero_grad()
    target.gradient_checkpointing_disable()
    target.disable_input_require_grads()


def test_the_settings_of_the_process_stay_as_they_are(pair_folder: Any) -> None:
    flags = torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.flash_sdp_enabled, torch.is_grad_enabled
    before = [flag() for flag in flags]
    pair = load_pair(pair_folder / "target", pair_folder / "draft")
    decode(pair, [Request(prompts(1)[0])])
    assert [flag() for flag in flags] == before
    assert isinstance(pair.target, nn.Module)


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attends_again_when_the_last_thread_has_left(before: bool) -> None:
    enabled, kept = torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled()
    device = torch.device("cuda")
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        # As two threads enter and leave in turn.
        with without_cudnn(torch.device("cpu")):
            assert enabled() == before
        first, second = without_cudnn(device), without_cudnn(device)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not enabled()
        second.__exit__(None, None, None)
        assert enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
