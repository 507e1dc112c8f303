"""Loading a pair from folders and hub names: it is the saved pair, or it is refused in one line with the reason."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from conftest import EOS, VOCABULARY, build_draft, build_model
from safetensors.torch import load_file, save_file
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models import loading
from specstop.decode.models.pair import Pair, join, load_pair, model_hash
from specstop.policies.errors import InputError, PairError, SpecstopError
from specstop.policies.fixed import FixedLength
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

Patch = pytest.MonkeyPatch

UP = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(pair_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair_folder, tmp_path / "pair"))


def load(folder: Path, **options: Any) -> Pair:
    return load_pair(folder / "target", folder / "draft", **options)


def test_a_loaded_pair_is_the_saved_one(plain_pair: Pair) -> None:
    target = build_model()
    assert plain_pair.fingerprint["target"] == model_hash(target)
    assert plain_pair.fingerprint["draft"] == model_hash(build_draft(target))
    assert set(plain_pair.fingerprint) == {"target", "draft", "tokenizer"}
    assert (plain_pair.vocabulary, plain_pair.eos, plain_pair.logits_dtype) == (VOCABULARY, (EOS,), torch.float64)
    assert not plain_pair.target.training and not plain_pair.draft_model.training


def test_a_checkpoint_has_one_fingerprint_in_every_dtype(plain_pair: Pair, pair_folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        pair = load(pair_folder, dtype=dtype)
        assert (str(pair.target.dtype), pair.logits_dtype) == (f"torch.{dtype}", torch.float32)
        assert pair.fingerprint == plain_pair.fingerprint


def test_fingerprints_of_other_weights_and_tokenizers_differ(
    plain_pair: Pair, tokenizer: PreTrainedTokenizerFast
) -> None:
    for name in ("model.embed_tokens.weight", UP, "model.norm.weight"):
        changed = copy.deepcopy(plain_pair.target)
        with torch.no_grad():
            changed.get_parameter(name).mul_(1.5)
        assert model_hash(changed) != plain_pair.fingerprint["target"]
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["extra"])
    wide = join(build_model(vocab_size=VOCABULARY + 1), None, other)
    assert wide.fingerprint["tokenizer"] != plain_pair.fingerprint["tokenizer"]


def test_the_end_of_text_is_that_of_the_generation_config_or_else_of_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    target = build_model()
    for configured, expected in (([3, 4], (3, 4)), (7, (7,)), (None, (EOS,))):
        target.generation_config.eos_token_id = configured
        assert join(target, None, tokenizer).eos == expected
    assert join(target, None).eos == ()
    for value in ("</s>", True, [2, "a"]):
        target.generation_config.eos_token_id = value
        with pytest.raises(PairError, match="eos_token_id"):
            join(target, None, tokenizer)


def test_vocabularies_may_differ_by_padding_or_further_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    target, draft = build_model(vocab_size=VOCABULARY + 16), build_model(1)
    assert join(target, draft).vocabulary == VOCABULARY + 16
    assert join(target, build_model(vocab_size=40, eos_token_id=2), tokenizer).vocabulary == VOCABULARY + 16
    for other in (build_model(vocab_size=VOCABULARY + 512), build_model(vocab_size=40, eos_token_id=2)):
        with pytest.raises(PairError, match=f"different vocabularies: {other.config.vocab_size} and 48 tokens"):
            join(other, draft)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<extra>"])
    for role in ("target", "draft"):
        larger.save_pretrained(folder / role)
        pair = load(folder)
        assert Speculator(pair, FixedLength(2), Settings(0.0, 6)).generate([5, 6]).tokens
        with pytest.raises(InputError, match="token id 48"):
            Speculator(pair, FixedLength(2)).generate([5, 48])
        tokenizer.save_pretrained(folder / role)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype: .*'float8'"), ({"device": "abacus"}, "device: 'abacus'"),
        *(({"device_map": text}, "device") for text in ("{", '{"model": "no"}')),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(pair_folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(SpecstopError, match=message):
        load(pair_folder, **options)


def change_json(file: str, **changes: Any) -> Damage:
    def damage(model: Path) -> None:
        raw = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**raw, **changes}))

    return damage


def config(**changes: Any) -> Damage:
    return change_json("config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def extra(name: str) -> Damage:
    return weights(lambda tensors: tensors.update({name: torch.zeros(3)}))


def crafted(model: Path) -> None:
    """Replace the weights by a pickle that runs a command when it is loaded."""

    class Crafted:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{model.parent / 'ran'}'",)

    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Crafted()))


def in_pickle(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def in_shards(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, model / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def swap_tokens(model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(raw))


CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
REFUSED: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json"),
    "broken weights": (lambda m: (m / "model.safetensors").write_bytes(b"junk"), "cannot load a model"),
    "half is missing": (weights(lambda t: [t.pop(name) for name in sorted(t)[::2]]), "lm_head.weight and 10 more"),
    "a tensor is transposed": (weights(lambda t: t.update({UP: t[UP].T.contiguous()})), rf"{UP} of shape \[16, 32\]"),
    "a layer too many": (extra("model.layers.7.mlp.up_proj.weight"), r"model\.layers\.7\.mlp\.up_proj\.weight"),
    "NaN among the weights": (weights(lambda t: t[UP][3].fill_(math.nan)), f"{UP} .*NaN or infinite in float64"),
    "a crafted pickle": (crafted, "pickle"),
    "no heads": (config(num_attention_heads=0), "cannot load a model"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers.* from 1 to 1024"),
    "negative width": (config(hidden_size=-16), "hidden_size.*not -16"),
    "an end in words": (config(eos_token_id="</s>"), "eos_token_id"),
    "an attention that is not installed": (config(_attn_implementation="flash_attention_2"), "FlashAttention2"),
    "no language model": (config(model_type="t5"), "causal language model, not 't5'"),
    "code for an unknown kind": (config(model_type="nobody_knows", auto_map=CODE), "never run"),
    "terminal escape codes": (config(model_type="\x1b[2J"), r"model type `\?\[2J`"),
    "nesting without end": (lambda m: (m / "config.json").write_text("[" * 99_999), "cannot load a model"),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), "JSON object in config.json"),
    "a broken tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
    "another tokenizer": (swap_tokens, "share one tokenizer"),
}


@pytest.mark.parametrize(("name", "role"), [(name, ("target", "draft")[at % 2]) for at, name in enumerate(REFUSED)])
def test_a_damaged_model_is_refused_in_one_line_with_the_reason(folder: Path, name: str, role: str) -> None:
    damage, message = REFUSED[name]
    damage(folder / role)
    with pytest.raises(PairError, match=message) as error:
        load(folder, dtype="float64")
    line = str(error.value)
    assert line.startswith(role if name != "another tokenizer" else "target and draft") and line.isprintable()
    assert len(line) < 600 and "trust_remote_code" not in line
    assert not (folder / "ran").exists(), "no command of a pickle runs"


ACCEPTED: dict[str, Damage] = {
    "weights as a pickle of tensors": in_pickle,
    "weights in shards": in_shards,
    "a head for another task": extra("v_head.weight"),
    "tied but different embeddings": config(tie_word_embeddings=True),
    "code for a known kind": config(auto_map=CODE),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_unusual_folder_decodes_as_with_the_library(folder: Path, prompt_ids: list[list[int]], name: str) -> None:
    ACCEPTED[name](folder / "target")
    pair, ids = load(folder, dtype="float64"), torch.tensor([prompt_ids[3]])
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    text = Speculator(pair, FixedLength(3), Settings(0.0, 12)).generate(prompt_ids[3])
    assert [*prompt_ids[3], *text.tokens] == expected[0].tolist()


def test_models_larger_than_the_memory_are_refused_before_they_are_loaded(folder: Path, monkeypatch: Patch) -> None:
    need = 2 * 4 * sum(tensor.numel() for tensor in load_file(folder / "target" / "model.safetensors").values())
    monkeypatch.setattr(loading, "available_bytes", lambda device: need)
    load(folder)
    monkeypatch.setattr(loading, "available_bytes", lambda device: need - 1)
    with pytest.raises(PairError, match=r"target and draft: float32 .*GB .*dtype.*device_map"):
        load(folder)
    load(folder, dtype="bfloat16")
    load(folder, device_map="auto")
    extra("tower.weight")(folder / "target")
    monkeypatch.setattr(loading, "available_bytes", lambda device: need // 2)
    load_pair(folder / "target")  # the model has no layer for that tensor
    monkeypatch.undo()
    assert loading.available_bytes(torch.device("meta")) is None


def test_a_hub_name_is_requested_once_unless_it_is_below_a_local_folder(
    pair_folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    requests: list[str] = []

    def unreachable(name: str, **_: object) -> None:
        requests.append(name)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading, "model_info", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(PairError, match="m/q3 does not exist"):
        load_pair("m/q3")
    assert not requests
    with pytest.raises(PairError, match=r"someone/thing .*not known"):
        load_pair("someone/thing")
    assert len(requests) == 1
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda _, file: str(pair_folder / "target" / file))
    assert load_pair("m/q3").draft is None, "a cached model needs no hub"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder/x.gguf", "gguf_file="), ("folder", "gguf_file="), ("folder/model.safetensors", "config.json"),
        ("some one/thing", "model folder or a hub name"), ("x/..", "model folder or a hub name"),
        ("someone/thing", "HF_HUB_OFFLINE"),
    ],
)  # fmt: skip
def test_a_name_without_a_model_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: Patch, name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("x.gguf", "model.safetensors"):
        (tmp_path / "folder" / file).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PairError, match=f"target: .*{message}"):
        load_pair(name)
