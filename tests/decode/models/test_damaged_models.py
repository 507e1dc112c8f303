"""Model folders that are not what they say: each is one line that names what is amiss, and nothing is filled in."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_families import family
from conftest import build_draft, build_model
from safetensors.torch import load_file, save_file
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import PairError
from specstop.policies.fixed import FixedLength
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

UP = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(pair_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair_folder, tmp_path / "pair"))


def config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**raw, **changes}))

    return damage


def generation(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        raw = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps({**raw, **changes}))

    return damage


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def without(name: str) -> Damage:
    return weights(lambda tensors: tensors.pop(name))


def also(name: str) -> Damage:
    return weights(lambda tensors: tensors.update({name: tensors[UP].clone()}))


def holding(value: float) -> Damage:
    return weights(lambda tensors: tensors[UP][3].__setitem__(4, value))


def pickled(content: Any, raw: bool = False) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        made = content(tensors, model.parent / "ran")
        if raw:
            (model / "pytorch_model.bin").write_bytes(pickle.dumps(made))
        else:
            torch.save(made, model / "pytorch_model.bin")

    return damage


class Crafted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def sharded(**index: Any) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        names = sorted(tensors)
        places = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(names)}
        for part in set(places.values()):
            chosen = {name: tensors[name] for name in names if places[name] == part}
            save_file(chosen, model / part, metadata={"format": "pt"})
        full = {"metadata": {"total_size": 1}, "weight_map": places, **index}
        (model / "model.safetensors.index.json").write_text(json.dumps(full))

    return damage


SIZE = "expected a whole number from 1 to 2147483647, not"
REFUSED: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (without(UP), f"the weight files lack {UP}"),
    "the head is missing": (without("lm_head.weight"), r"the weight files lack lm_head\.weight"),
    "half is missing": (
        weights(lambda t: [t.pop(name) for name in sorted(t)[::2]]),
        r"the weight files lack lm_head\.weight and 10 more tensors",
    ),
    "a tensor is transposed": (
        weights(lambda t: t.update({UP: t[UP].T.contiguous()})),
        rf"the weight files have {UP} of shape \[16, 32\], but config\.json describes \[32, 16\]",
    ),
    "a layer too many": (also("model.layers.7.mlp.up_proj.weight"), r"model\.layers\.7\.mlp\.up_proj\.weight"),
    "a bias too many": (also("model.layers.1.mlp.up_proj.bias"), "up_proj.bias"),
    "a bias too few": (config(mlp_bias=True), r"lack model\.layers\.0\.mlp\.down_proj\.bias and 5 more tensors"),
    "NaN among the weights": (holding(math.nan), rf"{UP} has values that are NaN or infinite in float64"),
    "infinity among the weights": (holding(-math.inf), rf"{UP} has values that are NaN or infinite in float64"),
    "a crafted pickle": (pickled(lambda t, ran: Crafted(ran), raw=True), "its weights are a pickle of more than tensors"),
    "a crafted archive": (pickled(lambda t, ran: {**t, "x": Crafted(ran)}), "pickle of more than tensors; nothing of it was"),
    "a pickle of no tensors": (pickled(lambda t, ran: [1, 2]), "cannot load a model from"),
    "an index without a map": (sharded(weight_map=None), "cannot load a model from"),
    "an index that leads out": (sharded(weight_map={UP: "../../no.safetensors"}), "cannot load a model from"),
    "an index of one tensor": (sharded(weight_map={UP: "part-0.safetensors"}), "the weight files lack"),
    "no heads": (config(num_attention_heads=0), "cannot load a model from"),
    "no key heads": (config(num_key_value_heads=0), f"num_key_value_heads: {SIZE} 0"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers: expected a whole number from 1 to 1024, not 0"),
    "negative width": (config(hidden_size=-16), f"hidden_size: {SIZE} -16"),
    "negative heads": (config(num_attention_heads=-2), f"num_attention_heads: {SIZE} -2"),
    "negative positions": (config(max_position_embeddings=-1), f"max_position_embeddings: {SIZE} -1"),
    "a width in words": (config(hidden_size="16"), r"Field 'hidden_size' expected int, got str \(value: '16'\)"),
    "no positions": (config(max_position_embeddings=None), "'max_position_embeddings' expected int, got NoneType"),
    "no vocabulary": (config(vocab_size=None), "'vocab_size' expected int, got NoneType"),
    "an end in words": (config(eos_token_id="</s>"), "Field 'eos_token_id' with value '</s>' doesn't match any type"),
    "a million layers": (
        config(num_hidden_layers=10**6),
        "num_hidden_layers: expected a whole number from 1 to 1024, not 1000000",
    ),
    "layers without end": (config(num_hidden_layers=10**15), "num_hidden_layers: expected a whole number from 1 to 1024"),
    "a width beyond numbers": (config(intermediate_size=2**70), "intermediate_size: expected a whole number from 1 to"),
    "one unknown activation": (config(hidden_act="nonsense"), "KeyError: 'nonsense'"),
    "an attention that is not installed": (config(_attn_implementation="flash_attention_2"), "ImportError: FlashAttention2"),
    "an attention that there is not": (config(_attn_implementation="nonsense"), '"nonsense"` is not supported'),
    "an attention by number": (config(_attn_implementation=3), "cannot load a model from"),
    "an unknown kind": (config(model_type="nonsense"), "model type `nonsense`"),
    "no language model": (config(model_type="t5"), "model_type: expected a causal language model, not 't5'"),
    "code of its own": (config(model_type="own", auto_map={"AutoConfig": "own.C"}), "is never run; choose a model"),
    "a terminal's codes": (config(model_type="\x1b[2J"), r"model type `\?\[2J`"),
    "nesting without end": (lambda m: (m / "config.json").write_text("[" * 99_999), "cannot load a model from"),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), "expected a JSON object in config.json"),
    "a tokenizer in pieces": (lambda m: (m / "tokenizer.json").write_text("{"), "cannot load a tokenizer from"),
}  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_model_is_one_line_that_names_what_is_amiss(folder: Path, name: str, role: str) -> None:
    damage, message = REFUSED[name]
    damage(folder / role)
    with pytest.raises(PairError, match=message) as caught:
        load_pair(folder / "target", folder / "draft", dtype="float64")
    line = str(caught.value)
    assert line.startswith(f"{role}: cannot load ") and line.isprintable() and len(line) < 600
    assert not (folder / "ran").exists(), "nothing of a pickle runs"


@pytest.mark.parametrize("size", ["vocab_size", "intermediate_size"])
def test_a_size_without_end_is_refused_before_memory_is_taken(folder: Path, size: str) -> None:
    config(**{size: 2**31 - 1})(folder / "draft")
    with pytest.raises(PairError, match=r"^target and draft: .* GB"):
        load_pair(folder / "target", folder / "draft", dtype="float64")


@pytest.mark.parametrize("value", ["</s>", 3.5, True, [2, "a"], [[2]], {"a": 1}])
def test_an_end_of_text_that_is_no_token_is_named(folder: Path, value: Any) -> None:
    generation(eos_token_id=value)(folder / "target")
    with pytest.raises(
        PairError, match=r"^the target's eos_token_id: expected a token's number, or a list of them, not "
    ):
        load_pair(folder / "target", folder / "draft")


def test_weights_too_large_for_the_dtype_are_named(folder: Path) -> None:
    holding(1e6)(folder / "draft")
    load_pair(folder / "target", folder / "draft", dtype="float32")
    with pytest.raises(PairError, match=f"draft: .*{UP} has values that are NaN or infinite in float16"):
        load_pair(folder / "target", folder / "draft", dtype="float16")


def test_large_weights_are_not_taken_for_infinite_ones(folder: Path) -> None:
    """Their sum is beyond the numbers of their type, which is what is looked at first."""
    weights(lambda tensors: tensors[UP].fill_(1e38))(folder / "draft")
    loaded = load_pair(folder / "target", folder / "draft", dtype="float32")
    assert float(loaded.draft.get_parameter(UP).max()) == pytest.approx(1e38) if loaded.engines[1] == "plain" else True


ACCEPTED: dict[str, Damage] = {
    "weights as an honest pickle": pickled(lambda tensors, ran: tensors),
    "weights in shards": sharded(),
    "a head for another task": weights(lambda tensors: tensors.update({"v_head.weight": torch.zeros(3)})),
    "rotations that older versions kept": weights(
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    ),
    "an attention of the slower kind": config(_attn_implementation="eager"),
    "both ends tied though different": config(tie_word_embeddings=True),
    "no generation config": lambda model: (model / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_odd_folder_decodes_as_the_library_decodes_it(folder: Path, prompt_ids: list[list[int]], name: str) -> None:
    ACCEPTED[name](folder / "target")
    loaded = load_pair(folder / "target", folder / "draft", dtype="float64")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    for prompt in prompt_ids[2:4]:
        ids = torch.tensor([prompt])
        expected = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        made = Speculator(loaded, FixedLength(3), Settings(0.0, 12)).generate(prompt)
        assert [*prompt, *made.tokens] == expected[0].tolist()


def test_a_head_that_is_tied_need_not_be_in_the_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    target = build_model(tie_word_embeddings=True)
    for name, model in (("target", target), ("draft", build_draft(target))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        assert "lm_head.weight" not in load_file(tmp_path / name / "model.safetensors")
    loaded = load_pair(tmp_path / "target", tmp_path / "draft", dtype="float64")
    assert torch.equal(loaded.target.lm_head.weight, target.model.embed_tokens.weight)


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_that_sees_nothing_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, window: int) -> None:
    """A model without a window says so by null; one of 0 tokens used to change the text in silence."""
    small = {k: getattr(build_model().config, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    made = MistralForCausalLM(MistralConfig(**small, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    for name in ("target", "draft"):
        made.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    config(sliding_window=None)(tmp_path / "target")
    load_pair(tmp_path / "target", tmp_path / "draft")
    config(sliding_window=window)(tmp_path / "target")
    with pytest.raises(PairError, match=f"sliding_window: {SIZE} {window}"):
        load_pair(tmp_path / "target", tmp_path / "draft")


def test_damaged_folders_are_refused_or_decode_as_the_library_does(tmp_path: Path) -> None:
    seen, faults = family("configs").attack(12, 5, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 12
    assert {"refused", "decodes as the library does"} <= {name.split(": ")[1] for name in seen}
