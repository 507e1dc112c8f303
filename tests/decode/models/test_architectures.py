"""Every kind of model the loop takes gives its own greedy text, as target and as draft; the others are refused by name.

A seeded sample of the table that `benchmarks/architectures.py` makes.
"""

from __future__ import annotations

import copy
import random
from importlib.metadata import version

import pytest
import torch
from conftest import build_model
from contract_policies import TEST_POLICIES
from small_models import table
from specstop.decode.models.pair import join, load_pair, with_engine
from specstop.policies.baselines.fixed import Confidence, FixedLength
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import PairError
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

NEW = 16
TREE_POLICIES: list[StopPolicy] = [
    FixedLength(4),
    Confidence(0.2),
    TEST_POLICIES["selecting"],
    TEST_POLICIES["from-anchor"],
]
CHAIN_POLICIES: list[StopPolicy] = [
    *TREE_POLICIES,
    FixedLength(1),
    TEST_POLICIES["reads-history"],
    TEST_POLICIES["selecting"],
]
PLAIN = (("sdpa", "float64", "plain"), ("eager", "float32", "plain"))
CASES = [
    # The library's modules under one attention, in turn, and the fast engine: the benchmark goes through all.
    *((name, *PLAIN[name in table.EAGER_ONLY or at % 2]) for at, name in enumerate(table.CONFIGS)),
    *((name, "sdpa", "float32", "auto") for name in table.CONFIGS if name not in table.EAGER_ONLY),
]


@pytest.mark.parametrize(("name", "attention", "dtype", "engine"), CASES)
def test_greedy_text_is_that_of_generate(name: str, attention: str, dtype: str, engine: str) -> None:
    target = table.build(name, table.DTYPES[dtype], attention)
    pair = with_engine(join(copy.deepcopy(target), table.noisy(target)), engine)
    assert engine == "plain" or "plain" not in pair.engines
    prompts = table.prompts(2)
    expected = [table.plain(target, prompt, NEW) for prompt in prompts]
    assert all(len(set(text)) > 5 for text in expected), "a text that repeats itself says little"
    draw = random.Random(f"{name} {attention} {engine}")
    cells = [(None, draw.choice(CHAIN_POLICIES)), *((tree, draw.choice(TREE_POLICIES)) for tree in table.SHAPES[1:])]
    accepted = []
    for tree, policy in draw.sample(cells, 2):
        cell = table.compare(target, pair, policy, tree, prompts, expected, NEW)
        assert cell.wrong == 0, (tree, policy.name, cell.margins)
        assert cell.equal == len(prompts) or dtype != "float64"
        accepted.append(cell.accepted)
    assert min(accepted) > 0.0 and max(accepted) < 1.0, "some drafts are accepted and some are not"


@pytest.mark.parametrize(("first", "second"), [("llama", "gpt2"), ("gemma3", "opt"), ("gpt-neox", "mistral-window")])
def test_a_draft_may_be_of_another_kind(first: str, second: str) -> None:
    pair = join(table.build(first, torch.float64), table.build(second, torch.float64))
    prompts = table.prompts(2)
    expected = [table.plain(pair.target, prompt, 12) for prompt in prompts]
    for tree in (None, "3,2"):
        assert table.compare(pair.target, pair, FixedLength(2), tree, prompts, expected, 12).equal == 2


def test_the_comparison_tells_a_wrong_text_from_a_tie() -> None:
    target = table.build("llama", torch.float32)
    prompts = table.prompts(1)
    right = table.plain(target, prompts[0], 8)
    wrong = [[*right[:5], (right[5] + 1) % table.VOCABULARY, *right[6:]]]
    cell = table.compare(target, join(target, target), FixedLength(2), None, prompts, wrong, 8)
    assert (cell.equal, cell.wrong, len(cell.margins)) == (0, 1, 1)
    near = torch.tensor([0.0, 1.0, 1.0 + table.TIE / 4])
    target.forward = lambda ids: type("Out", (), {"logits": near.expand(1, ids.shape[1], 3)})()
    assert 0 < table.margin(target, [3]) < table.TIE


SMALL = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2}


def stateful() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(**SMALL, state_size=4))


def linear() -> PreTrainedModel:
    options = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "num_experts": 2,
               "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts_per_tok": 1,
               "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
               "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, **options))


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


REFUSED = {
    "mamba": (stateful, "is a \\w+, which has linear_attention layers"),
    "linear": (linear, "is a \\w+, which has linear_attention layers"),
    "encoder": (encoder_decoder, "is a T5ForConditionalGeneration, which cannot be decoded here"),
}  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str, role: str) -> None:
    build, message = REFUSED[name]
    models = {"target": build_model(), "draft": build_model(), role: build()}
    with pytest.raises(PairError, match=f"the {role} {message}") as error:
        join(models["target"], models["draft"])
    assert "\n" not in str(error.value)


def test_an_attention_backend_that_misreads_the_mask_is_refused_with_the_way_out() -> None:
    models = {"target": build_model(), "draft": build_model()}
    models["draft"].config._attn_implementation = "flex_attention"
    with pytest.raises(PairError, match=r"the draft uses flex_attention attention; expected sdpa or eager"):
        join(models["target"], models["draft"])
    models["draft"].set_attn_implementation("sdpa")
    join(models["target"], models["draft"])


def test_a_model_without_sdpa_is_loaded_with_what_it_has(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: object
) -> None:
    folder = tmp_path_factory.mktemp("gemma2")
    model = table.build("gemma2", torch.float32, "eager")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pair = load_pair(folder, folder)
    # Before 5.20 the library gave this model sdpa.
    older = tuple(map(int, version("transformers").split(".")[:2])) < (5, 20)
    assert pair.target.config._attn_implementation == ("sdpa" if older else "eager")
    prompt = [5, 6, 7, 8]
    assert (
        table.compare(pair.target, pair, FixedLength(3), "2,2", [prompt], [table.plain(model, prompt, 9)], 9).equal == 1
    )
