"""Damaged folders of models: each is refused in one line, or decodes as with transformers."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import random_models
import torch
from conftest import EOS
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import InputError, PairError
from specstop.policies.fixed import FixedLength
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

KINDS = ("llama", "mistral-window", "gemma2", "gpt2")
VALUES = st.none() | st.booleans() | st.integers(-1, 65) | st.floats() | st.text(max_size=5) | st.sampled_from(
    [10**6, 10**12, 2**70, [], [4], {}, {"a": {}}, "float16", "\ud800", "\x1b[2J", "t5", ["full_attention"] * 3])  # fmt: skip


@pytest.fixture(scope="module")
def originals(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target of each kind; `pair_folder` is of one kind."""
    root = tmp_path_factory.mktemp("originals")
    for kind in KINDS:
        attention = "eager" if kind in random_models.EAGER_ONLY else "sdpa"
        random_models.build(kind, torch.float64, attention).save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return root


def change_entry(model: Path, data: st.DataObject) -> None:
    """Replace or remove an entry of a configuration."""
    path = model / data.draw(st.sampled_from(["config.json", "config.json", "generation_config.json"]))
    raw = json.loads(path.read_text())
    name = data.draw(
        st.sampled_from(sorted({*raw, "eos_token_id", "quantization_config", "rope_scaling", "text_config"}))
    )
    raw[name] = data.draw(VALUES)
    if raw[name] == []:
        del raw[name]
    path.write_text(json.dumps(raw))


def change_bytes(model: Path, data: st.DataObject) -> None:
    """Change, insert or remove bytes of a file."""
    path = data.draw(st.sampled_from(sorted(model.iterdir())))
    raw = path.read_bytes()
    at = data.draw(st.integers(0, min(len(raw), 4096)))
    path.write_bytes(raw[:at] + data.draw(st.binary(max_size=8)) + raw[at + data.draw(st.integers(0, 8)) :])


def change_tensor(model: Path, data: st.DataObject) -> None:
    """Rename, reshape or overwrite a tensor."""

    tensors = load_file(model / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    name = data.draw(st.sampled_from([name, f"{name}x", name.replace("0", "7"), ""]))
    tensors[name] = data.draw(st.sampled_from([tensor[:1].clone(), tensor[None], torch.full_like(tensor, math.inf),
                                               torch.full_like(tensor, 1e30), tensor.half(), tensor.long()]))  # fmt: skip
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), change=st.sampled_from([change_entry, change_bytes, change_tensor]), data=st.data())
def test_a_changed_folder_is_refused_in_one_line_or_decodes_as_with_the_library(
    originals: Path, kind: str, change: Callable[[Path, st.DataObject], None], data: st.DataObject
) -> None:
    prompt, new = [5, 9, 4, 31], 8
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Path(shutil.copytree(originals / kind, Path(root) / "target"))
        change(model, data)
        try:
            pair = load_pair(model, originals / kind, dtype="float64")
            text = list(Speculator(pair, FixedLength(3), Settings(0.0, new)).generate(prompt).tokens)
        except (PairError, InputError) as error:
            line = str(error)
            assert line.isprintable() and len(line) < 700 and line.encode()
            return
        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        if target.generation_config.eos_token_id is None:
            target.generation_config.eos_token_id = EOS
        assert text == random_models.plain(target, prompt, new)
