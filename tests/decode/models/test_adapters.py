"""PEFT adapters: the text is that of peft's own `generate` under every engine, or the adapter is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from conftest import VOCABULARY, build_model
from safetensors.torch import load_file, save_file
from specstop.decode.models import loading
from specstop.decode.models.pair import Pair, join, load_pair, with_engine
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, PairError
from specstop.policies.fixed import FixedLength
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

PROMPT, NEW = [5, 9, 30, 11, 7], 24
MLP = ["gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=2, target_modules="all-linear"),
    "lora of the last layer": peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
    "dora with bias": peft.LoraConfig(r=2, target_modules=MLP, use_dora=True),
    "lora and a whole head": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "lora of the embeddings": peft.LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"]),
    "loha": peft.LoHaConfig(r=2, target_modules=MLP),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[5, 9, 11, 30], target_modules=["embed_tokens"]),
}
REFUSED: dict[str, peft.PeftConfig] = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=3),
    "activated LoRA": peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5]),
    "ADAPTION_PROMPT": peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1),
}


def _adapted(model: PreTrainedModel, config: peft.PeftConfig) -> peft.PeftModel:
    """Return a model with an adapter that was changed as training would."""
    config = type(config)(**{**config.to_dict(), "task_type": "CAUSAL_LM"}) if config.task_type is None else config
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return wrapped.eval()


def _save(folder: Path, config: peft.PeftConfig, base: Path) -> Path:
    wrapped = _adapted(AutoModelForCausalLM.from_pretrained(base), config)
    wrapped.save_pretrained(folder)
    return folder


def _reference(base: Path, adapter: Path) -> list[int]:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    return _greedy(model)


def _greedy(model: PreTrainedModel) -> list[int]:
    ids = model.generate(input_ids=torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW)
    return ids[0, len(PROMPT) :].tolist()


def _text(pair: Pair) -> list[int]:
    return list(decode(pair, [PROMPT], FixedLength(3), settings=Settings(max_new_tokens=NEW))[0].tokens)


@pytest.fixture(scope="module")
def folders(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, config in CONFIGS.items():
        _save(folder / name, config, pair_folder / "target")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_of_an_adapter_folder_is_that_of_peft(pair_folder: Path, folders: Path, name: str) -> None:
    expected = _reference(pair_folder / "target", folders / name)
    plain = load_pair(pair_folder / "target", pair_folder / "draft", engine="plain")
    assert _text(plain) != expected, "the adapter changes nothing"
    for engine in ("plain", "packed", "compact", "auto"):
        pair = load_pair(folders / name, pair_folder / "draft", engine=engine)
        assert _text(pair) == expected, engine
        assert pair.fingerprint["target"] != plain.fingerprint["target"]
        assert pair.fingerprint["draft"] == plain.fingerprint["draft"]
        assert pair.target.config.name_or_path == str(folders / name)


def test_a_draft_may_be_an_adapter(pair_folder: Path, folders: Path) -> None:
    pair = load_pair(pair_folder / "target", folders / "lora", engine="auto")
    assert _text(pair) == _text(load_pair(pair_folder / "target", pair_folder / "draft", engine="plain"))
    assert pair.draft_name == str(folders / "lora")


def test_half_precision_keeps_the_layers_of_an_adapter_and_one_fingerprint(pair_folder: Path, folders: Path) -> None:
    """Merged in bfloat16, small changes would be rounded away."""
    adapter = folders / "lora"
    model = AutoModelForCausalLM.from_pretrained(pair_folder / "target", dtype=torch.bfloat16)
    expected = _greedy(peft.PeftModel.from_pretrained(model, adapter))
    half = load_pair(adapter, pair_folder / "draft", dtype="bfloat16")
    assert _text(half) == expected
    assert half.fingerprint == load_pair(adapter, pair_folder / "draft").fingerprint
    with pytest.raises(InputError, match="compact"):
        load_pair(adapter, pair_folder / "draft", dtype="bfloat16", engine="compact")


def test_a_fingerprint_tells_adapters_apart(pair_folder: Path, folders: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folders / "lora", tmp_path / "other"))
    raw = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**raw, "lora_alpha": raw["lora_alpha"] + 1}))
    pairs = [load_pair(folder, pair_folder / "draft") for folder in (folders / "lora", other)]
    assert len({pair.fingerprint["target"] for pair in pairs}) == 2


def test_an_adapter_beside_full_weights_is_applied(pair_folder: Path, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(pair_folder / "target", tmp_path / "both")
    shutil.copytree(folders / "lora", tmp_path / "both", dirs_exist_ok=True)
    expected = _reference(pair_folder / "target", folders / "lora")
    for engine in ("plain", "auto"):
        assert _text(load_pair(tmp_path / "both", pair_folder / "draft", engine=engine)) == expected


def test_a_config_beside_an_adapter_is_no_model(pair_folder: Path, folders: Path, tmp_path: Path) -> None:
    """Many repositories of adapters hold a copy of their base model's config."""
    folder = Path(shutil.copytree(folders / "lora", tmp_path / "adapter"))
    shutil.copy(pair_folder / "target" / "config.json", folder)
    expected = _reference(pair_folder / "target", folders / "lora")
    assert _text(load_pair(folder, pair_folder / "draft")) == expected


def test_without_peft_an_adapter_is_refused_with_the_remedy(
    pair_folder: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    shutil.copytree(pair_folder / "target", tmp_path / "both")
    shutil.copytree(folders / "lora", tmp_path / "both", dirs_exist_ok=True)
    for folder in (folders / "lora", tmp_path / "both"):
        with pytest.raises(PairError, match=r"draft: .*pip install peft"):
            load_pair(pair_folder / "target", folder)


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_outside_the_layers_is_refused_by_name(pair_folder: Path, tmp_path: Path, name: str) -> None:
    folder = _save(tmp_path / "adapter", REFUSED[name], pair_folder / "target")
    with pytest.raises(PairError, match=f"target: .*{name}.*LoRA"):
        load_pair(folder, pair_folder / "draft")
    with pytest.raises(PairError, match=f"the target .*{name}.*LoRA"):
        join(_adapted(build_model(), REFUSED[name]), build_model(1))


def _change(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        name = next(name for name in tensors if key in name)
        save_file({**tensors, name: change(tensors[name]).contiguous()}, folder / "adapter_model.safetensors")

    return damage


def _drop(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / "adapter_model.safetensors")


def _set(**values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**raw, **values}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    {
        "nan": (_change("up_proj.lora_A", lambda t: t * float("nan")), "up_proj.*NaN"),
        "shape": (_change("up_proj.lora_A", lambda t: t[:1]), "up_proj"),
        "missing tensor": (_drop, "lack .*lora_A"),
        "rank": (_set(r=3), "size mismatch"),
        "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model"),
        "no base": (_set(base_model_name_or_path=None), "base_model_name_or_path"),
        "base is gone": (
            _set(base_model_name_or_path="/nowhere/at/all"),
            "the base model of .* /nowhere/at/all does not",
        ),
        "base is itself": (lambda f: _set(base_model_name_or_path=str(f))(f), "is an adapter itself"),
        "modules": (_set(target_modules=["nothing"]), "nothing"),
        "unknown type": (_set(peft_type="TELEPATHY"), "TELEPATHY"),
        "no json": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json"),
    }.values(),
)
def test_a_damaged_adapter_is_one_line(
    pair_folder: Path, folders: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(folders / "lora", tmp_path / "adapter"))
    damage(folder)
    with pytest.raises(PairError, match=f"^target: .*{message}") as caught:
        load_pair(folder, pair_folder / "draft")
    assert "\n" not in str(caught.value)


class Steered(nn.Linear):
    """A layer of somebody else's with an adapter inside, whose weight it reads."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = layer.weight
        self.adapter = nn.Linear(layer.in_features, layer.out_features, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight + self.adapter.weight)


def _load_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.load_adapter(str(folder))
    return model


def _steer(model: PreTrainedModel, _: Path) -> PreTrainedModel:
    torch.manual_seed(3)
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Steered(mlp.up_proj)
    return model


def _hook(model: PreTrainedModel, _: Path) -> PreTrainedModel:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output + 0.5)
    return model


def _disabled(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    wrapped = peft.PeftModel.from_pretrained(model, folder)
    wrapped.base_model.disable_adapter_layers()
    return wrapped


LIVE: dict[str, Callable[[PreTrainedModel, Path], PreTrainedModel]] = {
    "PeftModel": peft.PeftModel.from_pretrained,
    "disabled": _disabled,
    "load_adapter": _load_adapter,
    "subclass of Linear": _steer,
    "hook": _hook,
}


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("adapter", ["lora", "lora of the last layer"])
def test_no_engine_drops_what_a_model_carries(
    pair_folder: Path, folders: Path, tokenizer: PreTrainedTokenizerFast, name: str, adapter: str
) -> None:
    def build() -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(pair_folder / "target", dtype=torch.float32)
        return LIVE[name](model, folders / adapter)

    expected = _greedy(build())
    for engine in ("plain", "packed", "auto"):
        pair = with_engine(join(build(), build_model(2).float(), tokenizer), engine)
        assert _text(pair) == expected, engine
    with pytest.raises(InputError, match=r"engine compact: .*(layer|proj)"):
        with_engine(join(build(), build_model(2).float(), tokenizer), "compact")


def test_a_fingerprint_covers_an_adapter_that_a_model_carries(pair_folder: Path, folders: Path) -> None:
    def fingerprint(change: Callable[[PreTrainedModel], PreTrainedModel]) -> str:
        model = AutoModelForCausalLM.from_pretrained(pair_folder / "target", dtype=torch.float32)
        return join(change(model), None).fingerprint["target"]

    changes = (
        lambda m: m,
        *(lambda m, live=LIVE[name]: live(m, folders / "lora") for name in ("PeftModel", "disabled")),
    )
    assert len({fingerprint(change) for change in changes}) == 3


def test_vocabularies_of_a_pair_with_an_adapter_are_those_of_the_base(pair_folder: Path, folders: Path) -> None:
    assert load_pair(folders / "lora", pair_folder / "draft").vocabulary == VOCABULARY


def test_an_adapter_of_offloaded_layers_is_refused_with_the_remedy(pair_folder: Path, folders: Path) -> None:
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "disk",
    }
    places |= {"model.norm": "disk", "lm_head": "disk"}
    with pytest.raises(PairError, match=r"target: .*merge_and_unload"):
        load_pair(folders / "lora", pair_folder / "draft", device_map=json.dumps(places))
    assert _text(load_pair(folders / "lora", pair_folder / "draft", device_map="cpu")) == _reference(
        pair_folder / "target", folders / "lora"
    )
