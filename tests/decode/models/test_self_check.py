"""Before it decodes, a model is checked to read right: alone, beside others and as a tree; or it is refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from small_models import table
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join, with_engine
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, PairError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from torch import Tensor, nn
from transformers import PreTrainedModel

classes = table
PROMPTS = [list(prompt) for prompt in classes.PROMPTS]
APART = ("gptj", "falcon", "gpt_neo", "xglm", "bloom")
"""Classes whose attention is outside of transformers' interface."""


def build(name: str, **more: object) -> PreTrainedModel:
    model: PreTrainedModel = classes.build_class(name, more)
    return model.float() if name in ("xglm", "granitemoehybrid") else model  # these compute in float32


def texts(
    pair: Pair, depth: int, tree: str | None = None, batch: int = 3, verification: str = "auto"
) -> list[list[int]]:
    settings = Settings(0.0, classes.NEW, tree=tree, verification=verification)
    speculator = Speculator(pair, FixedLength(depth), settings, batch=batch)
    return [list(made.tokens) for made in speculator.run([Request(prompt) for prompt in PROMPTS])]


@pytest.mark.parametrize("name", APART)
@pytest.mark.filterwarnings("ignore::specstop.policies.errors.SpecstopWarning")
def test_texts_side_by_side_are_those_of_generate(name: str) -> None:
    target = build(name)
    expected = classes.expected_texts(target)
    pair = join(target, table.noisy(target))
    assert texts(pair, 0) == texts(pair, 3) == expected
    assert plain_texts(pair, PROMPTS, [0, 0, 0], classes.NEW, ignore_eos=True).tokens == expected


@pytest.mark.parametrize("name", APART)
def test_a_tree_is_read_right_or_refused_by_name(name: str) -> None:
    target = build(name)
    pair = join(target, table.noisy(target))
    try:
        assert texts(pair, 2, "2,2", 1) == classes.expected_texts(target)
    except PairError as error:
        assert type(target).__name__ in str(error) and "tree" in str(error)


def test_a_batch_that_is_read_one_at_a_time_is_warned_of_once() -> None:
    target = build("gptj")
    pair = join(target, table.noisy(target))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts(pair, 0, batch=1)
        assert not caught
        texts(pair, 0)
        texts(pair, 0)
    own = [str(one.message) for one in caught if one.category is SpecstopWarning]
    assert len(own) <= 2 and all("GPTJForCausalLM" in message for message in own)  # one of the target, one of the draft


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", ["roberta encoder", "rembert", "bert", "rwkv"])
def test_what_is_no_causal_decoder_is_refused_by_name(name: str, role: str) -> None:
    models = {"target": build("llama"), "draft": build("llama"), role: build(name)}
    with pytest.raises(PairError, match=f"the {role} is a {type(models[role]).__name__}") as error:
        join(models["target"], models["draft"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama4_text", {}),
        ("falcon alibi", {}),
        ("roberta", {}),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_flag_alone_is_no_reason_to_refuse(name: str, more: dict[str, object]) -> None:
    """Chunked attention, ALiBi, an encoder used as decoder, a hybrid without recurrent layers."""
    target = build(name, **more)
    assert texts(join(target, table.noisy(target)), 3, batch=1) == classes.expected_texts(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.002, 0.3])
def test_weights_of_any_size_and_type_are_judged_right(dtype: torch.dtype, spread: float) -> None:
    for name in ("qwen2_moe", "gemma3_text", "gptj"):
        target = build(name, initializer_range=spread).to(dtype)
        pair = join(target, None)
        assert pair.readings[0].side_by_side == (name != "gptj")


def test_the_check_leaves_no_trace() -> None:
    target, draft = build("gptj").train(), build("llama")
    before, config = torch.random.get_rng_state(), copy.deepcopy(target.config.to_dict())
    join(target, draft)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert target.config.to_dict() == config
    assert not any(isinstance(value, Tensor) and value.is_inference() for value in target.buffers())


class Rounded(nn.Module):
    """A linear layer that rounds its input to eight bits, with one scale for all tokens of a call."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 127
        rounded: Tensor = self.inner((x / scale).round() * scale)
        return rounded


def test_logits_that_depend_on_the_tokens_of_a_call_are_warned_of_once() -> None:
    target = build("llama")
    for layer in target.model.layers:
        layer.mlp.down_proj = Rounded(layer.mlp.down_proj)
    with pytest.warns(SpecstopWarning, match="depend on how many tokens a call reads"):
        join(target, build("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        join(target, build("llama"))


def test_a_changed_configuration_is_checked_again() -> None:
    target = build("roberta")
    join(target, None)
    target.config.is_decoder = False
    for module in target.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(PairError, match="the target is a RobertaForCausalLM"):
        join(target, None)


def test_a_prompt_with_a_token_that_the_target_does_not_score_is_refused() -> None:
    pair = join(build("llama"), build("llama"))
    with pytest.raises(InputError, match="token id 96"):
        Speculator(pair, FixedLength(2)).run([Request([5, 96])])


@pytest.mark.parametrize("name", ["hunyuan_v1_moe", "longcat_flash"])
def test_a_router_that_reads_the_weight_of_its_layer_is_left_as_it_is(name: str) -> None:
    target = build(name, num_key_value_heads=4, head_dim=4).float()
    expected = classes.expected_texts(target)
    pair = with_engine(join(target, None), "packed")
    assert plain_texts(pair, PROMPTS, [0, 0, 0], classes.NEW, ignore_eos=True).tokens == expected
