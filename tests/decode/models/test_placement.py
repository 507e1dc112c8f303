"""Targets that accelerate has placed on several devices, and quantised ones: their texts and hashes stay the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import DEVICE, Accelerator, to_device
from commands import cli
from conftest import EOS, VOCABULARY, build_draft, build_model
from specstop.decode import Settings, Speculator, plain_texts
from specstop.decode.loop import Request
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import open_cache
from specstop.decode.models.pair import Pair, join, load_pair
from specstop.decode.models.placement import call_from, copy_to_host, tensors
from specstop.policies import FixedLength
from specstop.policies.errors import InputError, SpecstopError, SpecstopWarning
from torch import nn
from transformers import PreTrainedTokenizerFast, quantizers
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

pytest.importorskip("accelerate")
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

SPREAD = {
    "model.embed_tokens": "disk",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "lm_head": "disk",
}


def texts(pair: Pair, batch: int = 1, tree: str | None = None, length: int = 10) -> list[list[int]]:
    speculator = Speculator(pair, FixedLength(3), Settings(0.7, length, tree=tree, verification="match"), batch=batch)
    return [list(one.tokens) for one in speculator.run([Request([3, 4, 5], key) for key in range(3)])]


@pytest.fixture(scope="module")
def spread(pair_folder: Path) -> Pair:
    """Half of the target lies on disk."""
    with pytest.warns(SpecstopWarning, match="neither packed nor recorded as CUDA graphs: .* on disk, cpu$"):
        folders = pair_folder / "target", pair_folder / "draft"
        return load_pair(*folders, dtype="float64", device_map=json.dumps(SPREAD))


def test_a_target_on_disk_writes_the_same_texts(spread: Pair, plain_pair: Pair) -> None:
    assert spread.engines[0] == "plain" and spread.target.device.type == "meta" and spread.device.type == "cpu"
    assert spread.fingerprint == plain_pair.fingerprint
    for batch, tree in ((1, None), (3, None), (1, "2,1")):
        assert texts(spread, batch, tree) == texts(plain_pair, batch, tree)


def test_what_it_cannot_do_is_said_once(spread: Pair, recwarn: pytest.WarningsRecorder) -> None:
    join(spread.target, spread.draft)
    assert not recwarn.list
    assert type(open_cache(spread.target, 8, VOCABULARY, device=spread.device)) is CachedModel


def test_ends_of_a_target_on_disk_can_be_learnt_from(spread: Pair, plain_pair: Pair) -> None:
    for place in ("get_input_embeddings", "get_output_embeddings"):
        theirs, ours = (getattr(pair.target, place)() for pair in (spread, plain_pair))
        assert torch.equal(copy_to_host(theirs).weight, ours.weight.float())
        assert theirs.weight.is_meta and not hasattr(copy_to_host(theirs), "_hf_hook")
    states = torch.ones(1, 16, dtype=torch.float64)
    assert torch.equal(*(pair.target.get_output_embeddings()(states) for pair in (spread, plain_pair)))


def test_the_command_takes_a_device_map(pair_folder: Path) -> None:
    pair = ("--target", str(pair_folder / "target"), "--draft", str(pair_folder / "draft"))
    asked = ("decode", "w3 w4", *pair, "--max-new-tokens", "8", "--json")
    placed, plain = (json.loads(cli(*asked, *more).out)["texts"] for more in (("--device-map", "cpu"), ()))
    assert placed == plain


@pytest.mark.parametrize("device_map", ["everywhere", "{", '{"model": "no"}', '{"model": null}'])
def test_an_invalid_device_map_is_refused(pair_folder: Path, device_map: str) -> None:
    with pytest.raises(SpecstopError, match="device"):
        load_pair(pair_folder / "target", device_map=device_map)


@pytest.mark.parametrize("whole", [False, True])
def test_a_target_between_devices_is_called_from_the_drafts(whole: bool) -> None:
    target = build_model()
    draft = build_draft(target)
    expected = Pair(target, draft, None, VOCABULARY, (EOS,))
    with Accelerator(), torch.no_grad():
        there = copy.deepcopy(target)
        if whole:
            to_device(there)
            call_from(there, torch.device("cpu"))
        else:
            for name in ("model.layers.1", "lm_head"):
                to_device(there.get_submodule(name))
            for name in SPREAD:
                module = there.get_submodule(name)
                device = DEVICE if name in ("model.layers.1", "lm_head") else "cpu"
                add_hook_to_module(module, AlignDevicesHook(torch.device(device), skip_keys="past_key_values"))
            add_hook_to_module(there, AlignDevicesHook(torch.device("cpu"), skip_keys="past_key_values"))
        with pytest.warns(SpecstopWarning, match="on several devices"):
            pair = join(there, draft)
        for batch, tree in ((3, None),) if whole else ((1, None), (3, "2,1")):
            assert texts(pair, batch, tree, 4) == texts(expected, batch, tree, 4)


class Eighth(nn.Module):
    """A linear layer of whole numbers from -127 to 127 and a scale."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(like.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(len(like.weight), 1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Iterator[Path]:
    """The folder of a model whose linear layers are quantised, as a plugin of transformers loads them."""

    @register_quantization_config("eighth")
    class Config(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(quant_method="eighth")

    @register_quantizer("eighth")
    class Quantizer(HfQuantizer):  # type: ignore[misc]
        requires_calibration = False
        is_trainable = False

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            for layer in model.model.layers:
                for part in (layer.self_attn, layer.mlp):
                    for name, child in list(part.named_children()):
                        if isinstance(child, nn.Linear):
                            setattr(part, name, Eighth(child))

    model = build_model().to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("quantised")
    tokenizer.save_pretrained(folder)
    state = model.state_dict()
    for name, weight in list(state.items()):
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            state |= {name: (weight / scale).round().to(torch.int8), name.replace("weight", "scale"): scale}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "eighth"}}))
    yield folder
    del quantizers.auto.AUTO_QUANTIZER_MAPPING["eighth"], quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING["eighth"]


def test_a_quantised_target_stays_as_it_was_saved(quantised: Path, pair_folder: Path) -> None:
    with pytest.warns(SpecstopWarning, match="^the target runs as it is, .*: its weights are quantised$"):
        pair = load_pair(quantised, pair_folder / "draft", dtype="float32")
    assert pair.target.dtype == torch.bfloat16 and pair.draft_model.dtype == torch.float32
    assert pair.target.model.layers[0].mlp.up_proj.weight.dtype == torch.int8 and pair.engines == ("plain", "compact")
    assert texts(pair) == [list(plain_texts(pair, [[3, 4, 5]], [key], 10, 0.7).tokens[0]) for key in range(3)]
    again = load_pair(quantised, pair_folder / "draft", device_map="cpu")
    assert again.fingerprint == pair.fingerprint
    with pytest.raises(InputError, match="engine packed: its weights are quantised"):
        load_pair(quantised, pair_folder / "draft", engine="packed")


def test_tensors_that_stand_for_others_are_hashed_by_their_parts() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)), requires_grad=False)
    assert {name: part.tolist() for name, part in tensors(layer)} == {
        "weight.a": [[1.0, 1.0], [1.0, 1.0]], "weight.b": [[0.0, 0.0], [0.0, 0.0]]
    }  # fmt: skip
