"""Loading a pair: what does not fit together is refused in one line that names it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import EOS, VOCABULARY, build_draft, build_model
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, join, load_pair, model_hash
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, PairError
from specstop.policies.fixed import FixedLength
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture
def folder(pair_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair_folder, tmp_path / "pair"))


def test_a_loaded_pair_is_the_one_that_was_saved(pair: Pair) -> None:
    target = build_model()
    assert pair.fingerprint["target"] == model_hash(target)
    assert pair.fingerprint["draft"] == model_hash(build_draft(target))
    assert set(pair.fingerprint) == {"target", "draft", "tokenizer"}
    assert (pair.vocabulary, pair.eos, pair.logits_dtype) == (VOCABULARY, (EOS,), torch.float64)
    assert not pair.target.training
    assert not pair.draft.training


@pytest.mark.parametrize(("dtype", "logits"), [("float32", torch.float32), ("bfloat16", torch.float32)])
def test_dtype_is_that_of_the_weights(pair_folder: Path, dtype: str, logits: torch.dtype) -> None:
    loaded = load_pair(pair_folder / "target", pair_folder / "draft", dtype=dtype)
    assert str(loaded.target.dtype) == f"torch.{dtype}"
    assert loaded.logits_dtype == logits


def _shift_token(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(folder / "draft")
    file = folder / "draft" / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f, t: shutil.rmtree(f / "target"),
            "target: expected a model folder or a hub name, but .*target does not exist",
        ),
        (lambda f, t: (f / "draft" / "config.json").unlink(), r"draft: .*draft has no config\.json"),
        (lambda f, t: (f / "draft" / "config.json").write_text("{"), "draft: cannot load"),
        (
            lambda f, t: (f / "draft" / "model.safetensors").write_bytes(b"junk"),
            "draft: cannot load a model from .*draft",
        ),
        (
            lambda f, t: (f / "target" / "model.safetensors").unlink(),
            "target: cannot load a model from .*target",
        ),
        (_shift_token, "share one tokenizer, but .*target has 48 tokens and .*draft has 48"),
    ],
    ids=["no folder", "no config", "broken config", "broken weights", "no weights", "another tokenizer"],
)
def test_a_folder_that_is_no_model_is_named(
    folder: Path, tokenizer: PreTrainedTokenizerFast, damage: Callable[..., None], message: str
) -> None:
    damage(folder, tokenizer)
    with pytest.raises(PairError, match=message) as caught:
        load_pair(folder / "target", folder / "draft")
    assert "\n" not in str(caught.value)


def test_different_vocabularies_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """Those of one end of text may differ by padding; the ends of these differ too."""
    target, draft = build_model(), build_model(vocab_size=40, eos_token_id=2)
    with pytest.raises(PairError, match="target and draft have different vocabularies: 48 and 40 tokens"):
        join(target, draft)
    assert join(target, draft, tokenizer).vocabulary == 48  # of a shared tokenizer the draft may know fewer tokens


@pytest.mark.parametrize("side", ["target", "draft"])
def test_tokens_after_those_of_the_other_are_no_reason_to_refuse(
    pair_folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, side: str
) -> None:
    shutil.copytree(pair_folder, tmp_path / "pair")
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<extra>"])
    other.save_pretrained(tmp_path / "pair" / side)
    pair = load_pair(tmp_path / "pair" / "target", tmp_path / "pair" / "draft")
    assert len(Speculator(pair, FixedLength(2), Settings(0.0, 6)).generate([5, 6]).tokens) > 0
    with pytest.raises(InputError, match="token id 48"):
        Speculator(pair, FixedLength(2)).generate([5, 48])


@pytest.mark.parametrize("role", ["target", "draft"])
def test_layers_that_cannot_be_rolled_back_are_refused_by_name(role: str) -> None:
    config = Qwen2Config(**SMALL)
    model = Qwen2ForCausalLM(config).double()
    model.config.layer_types = ["full_attention", "linear_attention"]
    models = {"target": build_model(), "draft": build_model(), role: model}
    with pytest.raises(PairError, match=f"the {role} is a Qwen2ForCausalLM, which has linear_attention layers"):
        join(models["target"], models["draft"])


def test_unknown_dtype_or_device_is_refused(pair_folder: Path) -> None:
    for options, message in (
        ({"dtype": "float8"}, "dtype: .*'float8'"),
        ({"device": "abacus"}, "device: 'abacus'"),
    ):
        with pytest.raises(InputError, match=message):
            load_pair(pair_folder / "target", pair_folder / "draft", **options)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_fingerprint_tells_a_changed_weight(pair: Pair, name: str) -> None:
    changed = copy.deepcopy(pair.target)
    with torch.no_grad():
        changed.get_parameter(name).mul_(1.5)
    assert model_hash(changed) != pair.fingerprint["target"]
    assert model_hash(copy.deepcopy(pair.target)) == pair.fingerprint["target"]


def test_a_checkpoint_has_one_fingerprint_loaded_in_bfloat16_or_more(pair_folder: Path) -> None:
    names = ("float32", "bfloat16", "float64")
    loaded = [load_pair(pair_folder / "target", pair_folder / "draft", dtype=name) for name in names]
    assert len({pair.target.dtype for pair in loaded}) == len(names)
    assert loaded[0].fingerprint == loaded[1].fingerprint == loaded[2].fingerprint


def test_a_fingerprint_tells_a_changed_tokenizer(pair: Pair, tokenizer: PreTrainedTokenizerFast) -> None:
    wide = [build_model(vocab_size=VOCABULARY + 1) for _ in range(2)]
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["extra"])
    assert join(*wide, other).fingerprint["tokenizer"] != pair.fingerprint["tokenizer"]


def test_the_end_of_text_is_the_generation_configs_or_else_the_tokenizers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = build_model()
    for configured, expected in (([3, 4], (3, 4)), (7, (7,)), (None, (EOS,))):
        target.generation_config.eos_token_id = configured
        assert join(target, build_model(), tokenizer).eos == expected
    assert join(target, build_model()).eos == ()
