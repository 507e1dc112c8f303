"""Loading a pair from folders and hub names, and PEFT adapters: the saved models, or refused in one line with the reason."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import peft
import pytest
import random_models as table
import torch
from conftest import EOS, VOCABULARY, build_draft, build_model
from damage import Evil
from safetensors.torch import load_file, save_file
from specstop.decode import Pair, Settings, Speculator, decode, join, load_pair, with_engine
from specstop.decode.models import loading
from specstop.decode.models.pair import model_hash
from specstop.policies import FixedLength, InputError, PairError, SpecstopError
from transformers import AutoModelForCausalLM, PreTrainedModel

PROMPT, NEW = [5, 9, 30, 11, 7], 12
UP = "model.layers.1.mlp.up_proj.weight"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(pair_folder, tmp_path):
    return Path(shutil.copytree(pair_folder, tmp_path / "pair"))


def load(folder: Path, **options: Any) -> Pair:
    return load_pair(folder / "target", folder / "draft", **options)


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype)


def greedy(model: PreTrainedModel, adapter: Path | None = None) -> list[int]:
    """Return the text of a model, or of its adapter with peft."""
    return table.plain(peft.PeftModel.from_pretrained(model, adapter) if adapter else model, PROMPT, NEW)


def text_of(pair: Pair) -> list[int]:
    return list(decode(pair, [PROMPT], FixedLength(3), settings=Settings(max_new_tokens=NEW))[0].tokens)


def test_a_loaded_pair_is_the_saved_one_and_its_fingerprint_follows_weights_and_tokenizer(
    plain_pair, pair_folder, tokenizer
):
    target = build_model()
    assert plain_pair.fingerprint["target"] == model_hash(target)
    assert plain_pair.fingerprint["draft"] == model_hash(build_draft(target))
    assert (plain_pair.vocabulary, plain_pair.eos, plain_pair.logits_dtype) == (VOCABULARY, (EOS,), torch.float64)
    assert not plain_pair.target.training and not plain_pair.draft_model.training
    for dtype in ("float32", "bfloat16"):
        pair = load(pair_folder, dtype=dtype)
        assert (str(pair.target.dtype), pair.logits_dtype) == (f"torch.{dtype}", torch.float32)
        assert pair.fingerprint == plain_pair.fingerprint
    for name in ("model.embed_tokens.weight", UP, "model.norm.weight"):
        changed = copy.deepcopy(plain_pair.target)
        with torch.no_grad():
            changed.get_parameter(name).mul_(1.5)
        assert model_hash(changed) != plain_pair.fingerprint["target"]
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["extra"])
    wide = join(build_model(vocab_size=VOCABULARY + 1), None, other)
    assert wide.fingerprint["tokenizer"] != plain_pair.fingerprint["tokenizer"]


def test_the_end_of_text_is_that_of_the_generation_config_or_of_the_tokenizer(tokenizer):
    target = build_model()
    for configured, expected in (([3, 4], (3, 4)), (7, (7,)), (None, (EOS,))):
        target.generation_config.eos_token_id = configured
        assert join(target, None, tokenizer).eos == expected
    assert join(target, None).eos == ()
    for value in ("</s>", True, [2, "a"]):
        target.generation_config.eos_token_id = value
        with pytest.raises(PairError, match="eos_token_id"):
            join(target, None, tokenizer)


def test_vocabularies_may_differ_by_padding_or_further_tokens(folder, tokenizer):
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
    ("name", "value"),
    [("dtype", "float8"), ("device", "abacus"), ("device_map", "{"), ("device_map", '{"model": "no"}')],
)
def test_invalid_arguments_are_refused(pair_folder, name, value):
    with pytest.raises(SpecstopError, match=name.partition("_")[0]):
        load(pair_folder, **{name: value})


def change_json(file: str, **changes: Any) -> Damage:
    def damage(model: Path) -> None:
        raw = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps({**raw, **changes}))

    return damage


config = partial(change_json, "config.json")


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def extra(name: str) -> Damage:
    return weights(lambda tensors: tensors.update({name: torch.zeros(3)}))


def crafted(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(model.parent / "ran")))


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
    "a pickle that runs a command": (crafted, "pickle"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers.* from 1 to 1024"),
    "an end in words": (config(eos_token_id="</s>"), "eos_token_id"),
    "an attention that is not installed": (config(_attn_implementation="flash_attention_2"), "FlashAttention2"),
    "no language model": (config(model_type="t5"), "causal language model, not 't5'"),
    "code for an unknown kind": (config(model_type="nobody_knows", auto_map=CODE), "never run"),
    "nesting without end": (lambda m: (m / "config.json").write_text("[" * 99_999), "cannot load a model"),
    "a broken tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
    "another tokenizer": (swap_tokens, "share one tokenizer"),
}


@pytest.mark.parametrize(("name", "role"), [(name, ("target", "draft")[at % 2]) for at, name in enumerate(REFUSED)])
def test_a_damaged_model_is_refused_in_one_line_with_the_reason(folder, name, role):
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
def test_an_unusual_folder_decodes_as_with_the_library(folder, name):
    ACCEPTED[name](folder / "target")
    assert (folder / "target" / "model.safetensors").exists() == (not name.startswith("weights"))
    assert text_of(load(folder, dtype="float64")) == greedy(base_model(folder, torch.float64))


def test_models_larger_than_the_memory_are_refused_before_they_are_loaded(folder, monkeypatch):
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder/x.gguf", "gguf_file="), ("folder", "gguf_file="), ("folder/model.safetensors", "config.json"),
        ("some one/thing", "model folder or a hub name"), ("x/..", "model folder or a hub name"),
        ("folder/q3", "folder/q3 does not exist"), ("someone/thing", "HF_HUB_OFFLINE"), ("someone/thing", "not known"),
    ],
)  # fmt: skip
def test_a_name_without_a_model_is_refused_with_a_remedy(pair_folder, tmp_path, monkeypatch, name, message):
    """The hub is called once, unless the name is below a local folder. A model in the cache needs no hub."""
    (tmp_path / "folder").mkdir()
    for file in ("x.gguf", "model.safetensors"):
        (tmp_path / "folder" / file).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    info = Mock(side_effect=OSError("[Errno -2] Name or service not known"))
    if message == "not known":
        monkeypatch.setattr(loading, "model_info", info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", message == "HF_HUB_OFFLINE")
    with pytest.raises(PairError, match=f"target: .*{message}"):
        load_pair(name)
    assert info.call_count == (message == "not known")
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda _, file: str(pair_folder / "target" / file))
    assert name != "folder/q3" or load_pair(name).draft is None


# PEFT adapters

MLP = ["gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=2, target_modules="all-linear"),
    "lora of the last layer": peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
    "dora with bias": peft.LoraConfig(r=2, target_modules=MLP, use_dora=True),
    "lora and a whole head": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[5, 9, 11, 30], target_modules=["embed_tokens"]),
}
OUTSIDE_THE_LAYERS: dict[str, peft.PeftConfig] = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3),
    "activated LoRA": peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5]),
}


def adapted(model: PreTrainedModel, config: peft.PeftConfig) -> peft.PeftModel:
    """Return a model with an adapter of random weights, as after training."""
    config = type(config)(**{**config.to_dict(), "task_type": "CAUSAL_LM"}) if config.task_type is None else config
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return wrapped.eval()


@pytest.fixture(scope="module")
def adapters(pair_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name, config in (CONFIGS | OUTSIDE_THE_LAYERS).items():
        adapted(base_model(pair_folder), config).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_of_an_adapter_folder_is_that_of_peft(pair_folder, adapters, name):
    plain, expected = greedy(base_model(pair_folder)), greedy(base_model(pair_folder), adapters / name)
    assert plain != expected, "the adapter matters"
    if name == "lora":
        pair = load_pair(pair_folder / "target", adapters / name)
        assert text_of(pair) == plain and pair.draft_name == str(adapters / name), "the adapter of a draft"
    engines = ("compact", "plain", "packed") if name == "lora" else ("auto",)
    pairs = [load_pair(adapters / name, pair_folder / "draft", engine=engine) for engine in engines]
    assert name != "lora" or tuple(pair.engines[0] for pair in pairs) == engines
    assert len({pair.fingerprint["target"] for pair in pairs}) == 1
    for pair in pairs:
        assert text_of(pair) == expected and pair.target.config.name_or_path == str(adapters / name)


def test_half_precision_keeps_the_layers_of_an_adapter_and_its_fingerprint(pair_folder, adapters):
    """Merged in bfloat16, small changes would be rounded away."""
    adapter, draft = adapters / "lora", pair_folder / "draft"
    half = load_pair(adapter, draft, dtype="bfloat16")
    assert text_of(half) == greedy(base_model(pair_folder, torch.bfloat16), adapter)
    assert half.fingerprint == load_pair(adapter, draft).fingerprint
    with pytest.raises(InputError, match="compact"):
        load_pair(adapter, draft, dtype="bfloat16", engine="compact")


def hooked(model: PreTrainedModel, _: Path) -> PreTrainedModel:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output + 0.5)
    return model


def disabled(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    wrapped.base_model.disable_adapter_layers()
    return wrapped


def test_fingerprints_of_different_adapters_differ(pair_folder, adapters, tmp_path):
    scaled = Path(shutil.copytree(adapters / "lora", tmp_path / "scaled"))
    change_json("adapter_config.json", lora_alpha=9)(scaled)
    loaded = [load_pair(folder) for folder in (pair_folder / "target", adapters / "lora", scaled)]
    changes = peft.PeftModel.from_pretrained, disabled
    joined = [join(change(base_model(pair_folder), adapters / "lora"), None) for change in changes]
    assert len({pair.fingerprint["target"] for pair in [*loaded, *joined]}) == 5


@pytest.mark.parametrize("change", [peft.PeftModel.from_pretrained, disabled, hooked])
def test_engines_keep_the_adapters_and_hooks_of_a_model(pair_folder, adapters, tokenizer, change):
    model, draft = change(base_model(pair_folder), adapters / "lora of the last layer"), build_model(2).float()
    expected, pair = greedy(model), join(model, draft, tokenizer)
    assert text_of(pair) == expected
    with pytest.raises(InputError, match=r"compact: .*(layer|proj)"):
        with_engine(pair, "compact")
    assert text_of(with_engine(pair, "auto")) == expected  # packed in place


@pytest.mark.parametrize("files", ["config.json", "*"])
def test_an_adapter_with_files_of_its_base_model_is_applied(pair_folder, adapters, tmp_path, files, monkeypatch):
    """Repositories of adapters may have a copy of the config of the base model, and of its weights."""
    folder = Path(shutil.copytree(adapters / "lora", tmp_path / "adapter"))
    for path in (pair_folder / "target").glob(files):
        shutil.copy(path, folder)
    assert text_of(load_pair(folder, pair_folder / "draft")) == greedy(base_model(pair_folder), adapters / "lora")
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    with pytest.raises(PairError, match=r"draft: .*pip install peft"):
        load_pair(pair_folder / "target", folder)


adapter_config = partial(change_json, "adapter_config.json")
REFUSED_ADAPTERS: dict[str, tuple[Damage, str]] = {
    "missing tensor": (lambda f: save_file({}, f / "adapter_model.safetensors"), "lack .*lora_A"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model"),
    "base does not exist": (adapter_config(base_model_name_or_path="/nowhere/at/all"), "/nowhere/at/all does not"),
    "base is itself": (lambda f: adapter_config(base_model_name_or_path=str(f))(f), "is an adapter itself"),
    "unknown type": (adapter_config(peft_type="TELEPATHY"), "TELEPATHY"),
    **{name: (lambda f: None, f"{name}.*LoRA") for name in OUTSIDE_THE_LAYERS},
}


@pytest.mark.parametrize("name", REFUSED_ADAPTERS)
def test_a_damaged_or_unsupported_adapter_is_refused_in_one_line(adapters, tmp_path, name):
    source = adapters / (name if name in OUTSIDE_THE_LAYERS else "lora")
    folder, (damage, message) = Path(shutil.copytree(source, tmp_path / "adapter")), REFUSED_ADAPTERS[name]
    damage(folder)
    with pytest.raises(PairError, match=f"^target: .*{message}") as error:
        load_pair(folder)
    assert "\n" not in str(error.value)
    if name in OUTSIDE_THE_LAYERS:
        with pytest.raises(PairError, match=f"the target .*{message}"):
            join(adapted(build_model(), OUTSIDE_THE_LAYERS[name]), None)
