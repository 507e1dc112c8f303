"""Loading a pair from folders and hub names: the pair is the saved one, or it is refused in one line with the reason."""

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
from attacks import configs
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
    for value in ("</s>", 3.5, True, [2, "a"], [[2]], {"a": 1}):
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
        ({"dtype": "float8"}, "dtype: .*'float8'"),
        ({"device": "abacus"}, "device: 'abacus'"),
        *(({"device_map": text}, "device") for text in ("everywhere", "{", '{"model": "no"}', '{"model": null}')),
    ],
)
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


def holding(value: float) -> Damage:
    return weights(lambda tensors: tensors[UP][3].__setitem__(4, value))


def pickled(content: Any, raw: bool = False) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        value = content(tensors, model.parent / "ran")
        if raw:
            (model / "pytorch_model.bin").write_bytes(pickle.dumps(value))
        else:
            torch.save(value, model / "pytorch_model.bin")

    return damage


class Crafted:
    """Runs a command when it is loaded from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def sharded(**index: Any) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(names)}
        for file in set(files.values()):
            part = {name: tensors[name] for name in names if files[name] == file}
            save_file(part, model / file, metadata={"format": "pt"})
        full = {"metadata": {"total_size": 1}, "weight_map": files, **index}
        (model / "model.safetensors.index.json").write_text(json.dumps(full))

    return damage


def swap_tokens(model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(raw))


LAYERS, CODE = "num_hidden_layers.* from 1 to 1024", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
REFUSED: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "cannot load a model"),
    "broken weights": (lambda m: (m / "model.safetensors").write_bytes(b"junk"), "cannot load a model"),
    "a tensor is missing": (weights(lambda t: t.pop(UP)), f"lack {UP}"),
    "half is missing": (weights(lambda t: [t.pop(name) for name in sorted(t)[::2]]), "lm_head.weight and 10 more"),
    "a tensor is transposed": (weights(lambda t: t.update({UP: t[UP].T.contiguous()})), rf"{UP} of shape \[16, 32\]"),
    "a layer too many": (extra("model.layers.7.mlp.up_proj.weight"), r"model\.layers\.7\.mlp\.up_proj\.weight"),
    "a bias too many": (extra("model.layers.1.mlp.up_proj.bias"), "up_proj.bias"),
    "a bias too few": (config(mlp_bias=True), "down_proj.bias and 5 more"),
    "NaN among the weights": (holding(math.nan), f"{UP} .*NaN or infinite in float64"),
    "a crafted pickle": (pickled(lambda t, ran: Crafted(ran), raw=True), "pickle"),
    "a crafted archive": (pickled(lambda t, ran: {**t, "x": Crafted(ran)}), "pickle"),
    "a pickle of no tensors": (pickled(lambda t, ran: [1, 2]), "cannot load a model"),
    "an index without a map": (sharded(weight_map=None), "cannot load a model"),
    "an index that leads out": (sharded(weight_map={UP: "../../no.safetensors"}), "cannot load a model"),
    "no heads": (config(num_attention_heads=0), "cannot load a model"),
    "no key heads": (config(num_key_value_heads=0), "num_key_value_heads.*not 0"),
    "a window without tokens": (config(sliding_window=0), "sliding_window.*not 0"),
    "no layers": (config(num_hidden_layers=0), LAYERS),
    "negative width": (config(hidden_size=-16), "hidden_size.*not -16"),
    "negative positions": (config(max_position_embeddings=-1), "max_position_embeddings.*not -1"),
    "no vocabulary": (config(vocab_size=None), "vocab_size"),
    "an end in words": (config(eos_token_id="</s>"), "eos_token_id"),
    "a width beyond numbers": (config(intermediate_size=2**70), "intermediate_size"),
    "an unknown activation": (config(hidden_act="nonsense"), "nonsense"),
    "an attention that is not installed": (config(_attn_implementation="flash_attention_2"), "FlashAttention2"),
    "an unknown attention": (config(_attn_implementation="nonsense"), "nonsense"),
    "an unknown kind": (config(model_type="nonsense"), "nonsense"),
    "no language model": (config(model_type="t5"), "causal language model, not 't5'"),
    "code for an unknown kind": (config(model_type="nobody_knows", auto_map=CODE), "never run"),
    "code for no kind": (config(model_type=None, auto_map=CODE), "never run"),
    "terminal escape codes": (config(model_type="\x1b[2J"), r"model type `\?\[2J`"),
    "nesting without end": (lambda m: (m / "config.json").write_text("[" * 99_999), "cannot load a model"),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), "JSON object in config.json"),
    "a broken tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
    "another tokenizer": (swap_tokens, "share one tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "role"), [(name, ("target", "draft")[at % 2]) for at, name in enumerate(REFUSED)])
def test_a_damaged_model_is_refused_in_one_line_with_the_reason(folder: Path, name: str, role: str) -> None:
    damage, message = REFUSED[name]
    damage(folder / role)
    with pytest.raises(PairError, match=message) as error:
        load(folder, dtype="float64")
    line = str(error.value)
    assert line.startswith(role if name != "another tokenizer" else "target and draft") and line.isprintable()
    assert len(line) < 600 and "trust_remote_code" not in line
    assert not (folder / "ran").exists(), "nothing of a pickle runs"


def test_values_that_a_dtype_cannot_hold_are_refused(folder: Path) -> None:
    holding(1e6)(folder / "draft")
    load(folder, dtype="float32")
    with pytest.raises(PairError, match=f"draft: .*{UP} .*NaN or infinite in float16"):
        load(folder, dtype="float16")
    weights(lambda tensors: tensors[UP].fill_(1e38))(folder / "draft")
    load(folder, dtype="float32")  # only their sum is infinite


ACCEPTED: dict[str, Damage] = {
    "weights as a pickle of tensors": pickled(lambda tensors, ran: tensors),
    "weights in shards": sharded(),
    "a head for another task": extra("v_head.weight"),
    "rotations that older versions kept": extra("model.layers.0.self_attn.rotary_emb.inv_freq"),
    "eager attention": config(_attn_implementation="eager"),
    "both ends tied though different": config(tie_word_embeddings=True),
    "code for a known kind": config(auto_map=CODE),
    "no generation config": lambda model: (model / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_unusual_folder_decodes_as_with_the_library(folder: Path, prompt_ids: list[list[int]], name: str) -> None:
    ACCEPTED[name](folder / "target")
    pair, ids = load(folder, dtype="float64"), torch.tensor([prompt_ids[3]])
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    text = Speculator(pair, FixedLength(3), Settings(0.0, 12)).generate(prompt_ids[3])
    assert [*prompt_ids[3], *text.tokens] == expected[0].tolist()


def test_randomly_damaged_folders_are_refused_or_decode_as_with_the_library(tmp_path: Path) -> None:
    outcomes, faults = configs.attack(12, 5, tmp_path)
    assert faults == [] and sum(outcomes.values()) == 12
    assert {"refused", "decodes as the library does"} <= {name.split(": ")[1] for name in outcomes}


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
    for size in ("vocab_size", "intermediate_size"):
        config(**{size: 2**31 - 1})(folder / "draft")
        with pytest.raises(PairError, match=r"^target and draft: .* GB"):
            load(folder, dtype="float64")
    assert loading.available_bytes(torch.device("meta")) is None


@pytest.fixture
def hub(monkeypatch: Patch, tmp_path: Path) -> list[str]:
    """The requests to a hub that cannot be reached, from an empty working folder."""
    requests: list[str] = []

    def unreachable(name: str, **_: object) -> None:
        requests.append(name)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading, "model_info", unreachable)
    monkeypatch.chdir(tmp_path)
    return requests


def test_a_hub_name_is_requested_once_unless_it_is_below_a_local_folder(
    pair_folder: Path, tmp_path: Path, monkeypatch: Patch, hub: list[str]
) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(PairError, match="m/q3 does not exist"):
        load_pair("m/q3")
    assert not hub
    with pytest.raises(PairError, match=r"someone/thing .*not known"):
        load_pair("someone/thing")
    assert len(hub) == 1
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda _, file: str(pair_folder / "target" / file))
    assert load_pair("m/q3").draft is None, "a cached model needs no hub"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "gguf_file=") for name in ("folder/x.gguf", "folder")),
        ("folder/model.safetensors", "config.json"),
        *((name, "model folder or a hub name") for name in ("some one/thing", "a--b/c", "x/..")),
        ("someone/thing", "HF_HUB_OFFLINE"),
    ],
)
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
