"""PEFT adapters: the text is that of `generate` with peft, or the adapter is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from conftest import build_model
from safetensors.torch import save_file
from specstop.decode.models import loading
from specstop.decode.models.pair import Pair, join, load_pair, with_engine
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, PairError
from specstop.policies.fixed import FixedLength
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PROMPT, NEW = [5, 9, 30, 11, 7], 12
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
REFUSED: dict[str, peft.PeftConfig] = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3),
    "activated LoRA": peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5]),
}


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype)


def adapted(model: PreTrainedModel, config: peft.PeftConfig) -> peft.PeftModel:
    """Return a model with an adapter of random weights, as after training."""
    config = type(config)(**{**config.to_dict(), "task_type": "CAUSAL_LM"}) if config.task_type is None else config
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return wrapped.eval()


def greedy(model: PreTrainedModel) -> list[int]:
    ids = model.generate(input_ids=torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW)
    return ids[0, len(PROMPT) :].tolist()


def text_of(pair: Pair) -> list[int]:
    return list(decode(pair, [PROMPT], FixedLength(3), settings=Settings(max_new_tokens=NEW))[0].tokens)


@pytest.fixture(scope="module")
def folders(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, config in (CONFIGS | REFUSED).items():
        adapted(base_model(pair_folder), config).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain_text(pair_folder: Path) -> list[int]:
    return greedy(base_model(pair_folder))


@pytest.fixture(scope="module")
def lora_text(pair_folder: Path, folders: Path) -> list[int]:
    return greedy(peft.PeftModel.from_pretrained(base_model(pair_folder), folders / "lora"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_of_an_adapter_folder_is_that_of_peft(
    pair_folder: Path, folders: Path, plain_text: list[int], name: str
) -> None:
    expected = greedy(peft.PeftModel.from_pretrained(base_model(pair_folder), folders / name))
    assert plain_text != expected, "the adapter matters"
    if name == "lora":
        pair = load_pair(pair_folder / "target", folders / name)
        assert text_of(pair) == plain_text and pair.draft_name == str(folders / name), "the adapter of a draft"
    for engine in ("plain", "packed", "compact", "auto") if name == "lora" else ("auto",):
        pair = load_pair(folders / name, pair_folder / "draft", engine=engine)
        assert text_of(pair) == expected, engine
        assert pair.target.config.name_or_path == str(folders / name)


def test_half_precision_keeps_the_layers_of_an_adapter_and_its_fingerprint(pair_folder: Path, folders: Path) -> None:
    """Merged in bfloat16, small changes would be rounded away."""
    adapter = folders / "lora"
    expected = greedy(peft.PeftModel.from_pretrained(base_model(pair_folder, torch.bfloat16), adapter))
    half = load_pair(adapter, pair_folder / "draft", dtype="bfloat16")
    assert text_of(half) == expected
    assert half.fingerprint == load_pair(adapter, pair_folder / "draft").fingerprint
    with pytest.raises(InputError, match="compact"):
        load_pair(adapter, pair_folder / "draft", dtype="bfloat16", engine="compact")


def test_fingerprints_of_different_adapters_differ(pair_folder: Path, folders: Path, tmp_path: Path) -> None:
    scaled = Path(shutil.copytree(folders / "lora", tmp_path / "scaled"))
    change_config(lora_alpha=9)(scaled)
    loaded = [load_pair(folder) for folder in (pair_folder / "target", folders / "lora", scaled)]
    wrapped = peft.PeftModel.from_pretrained(base_model(pair_folder), folders / "lora")
    joined = [join(copy.deepcopy(wrapped), None), join(disabled(base_model(pair_folder), folders / "lora"), None)]
    assert len({pair.fingerprint["target"] for pair in [*loaded, *joined]}) == 5


@pytest.mark.parametrize("files", ["config.json", "*"])
def test_an_adapter_with_files_of_its_base_model_is_applied(
    pair_folder: Path, folders: Path, lora_text: list[int], tmp_path: Path, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repositories of adapters may have a copy of the config of the base model, and of its weights."""
    folder = Path(shutil.copytree(folders / "lora", tmp_path / "adapter"))
    for path in (pair_folder / "target").glob(files):
        shutil.copy(path, folder)
    assert text_of(load_pair(folder, pair_folder / "draft")) == lora_text
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    with pytest.raises(PairError, match=r"draft: .*pip install peft"):
        load_pair(pair_folder / "target", folder)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_outside_the_layers_is_refused_by_name(folders: Path, name: str) -> None:
    with pytest.raises(PairError, match=f"target: .*{name}.*LoRA"):
        load_pair(folders / name)
    with pytest.raises(PairError, match=f"the target .*{name}.*LoRA"):
        join(adapted(build_model(), REFUSED[name]), None)


Damage = Callable[[Path], object]


def change_config(**values: object) -> Damage:
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**raw, **values}))

    return damage


DAMAGED: dict[str, tuple[Damage, str]] = {
    "missing tensor": (lambda f: save_file({}, f / "adapter_model.safetensors"), "lack .*lora_A"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model"),
    "base does not exist": (change_config(base_model_name_or_path="/nowhere/at/all"), "/nowhere/at/all does not"),
    "base is itself": (lambda f: change_config(base_model_name_or_path=str(f))(f), "is an adapter itself"),
    "unknown type": (change_config(peft_type="TELEPATHY"), "TELEPATHY"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_adapter_is_refused_in_one_line(folders: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(folders / "lora", tmp_path / "adapter"))
    damage, message = DAMAGED[name]
    damage(folder)
    with pytest.raises(PairError, match=f"^target: .*{message}") as error:
        load_pair(folder)
    assert "\n" not in str(error.value)


def hooked(model: PreTrainedModel, _: Path) -> PreTrainedModel:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output + 0.5)
    return model


def disabled(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    wrapped.base_model.disable_adapter_layers()
    return wrapped


@pytest.mark.parametrize("change", [peft.PeftModel.from_pretrained, disabled, hooked])
def test_engines_keep_the_adapters_and_hooks_of_a_model(
    pair_folder: Path, folders: Path, tokenizer: PreTrainedTokenizerFast, change: Callable[..., PreTrainedModel]
) -> None:
    model, draft = change(base_model(pair_folder), folders / "lora of the last layer"), build_model(2).float()
    expected, pair = greedy(model), join(model, draft, tokenizer)
    assert text_of(pair) == expected
    with pytest.raises(InputError, match=r"compact: .*(layer|proj)"):
        with_engine(pair, "compact")
    assert text_of(with_engine(pair, "auto")) == expected  # packed in place


def test_an_adapter_of_offloaded_layers_is_refused_with_the_remedy(
    pair_folder: Path, folders: Path, lora_text: list[int]
) -> None:
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
    places |= dict.fromkeys(("model.layers.0", "model.layers.1", "model.norm", "lm_head"), "disk")
    with pytest.raises(PairError, match=r"target: .*merge_and_unload"):
        load_pair(folders / "lora", pair_folder / "draft", device_map=json.dumps(places))
    assert text_of(load_pair(folders / "lora", pair_folder / "draft", device_map="cpu")) == lora_text
