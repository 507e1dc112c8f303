"""Damaged folders of drafters: each is refused in one line, or drafts without failing."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from small_drafters import TRAINED, small_network
from specstop.decode.drafters import with_drafter
from specstop.decode.drafters.folder import DRAFTER_FILE, WEIGHTS_FILE, TrainedDrafter, save_drafter
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError
from specstop.policies.files import digest
from specstop.policies.fixed import FixedLength


def trained(pair: Pair, kind: str) -> TrainedDrafter:
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network(kind, output.shape[1], pair.vocabulary, output)
    return TrainedDrafter(kind, network, pair.fingerprint["target"], {"prompts": 3}, {"acceptance": [0.5, 0.25]})


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON file and correct its checksum."""
    raw = json.loads((folder / DRAFTER_FILE).read_text())
    change(raw)
    raw["sha256"] = digest(raw)
    (folder / DRAFTER_FILE).write_text(json.dumps(raw))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights and correct all checksums."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (folder / WEIGHTS_FILE).write_bytes(data)
    edit(folder, lambda raw: raw["files"].update({WEIGHTS_FILE: hashlib.sha256(data).hexdigest()}))


@pytest.fixture(scope="module")
def originals(plain_pair, tmp_path_factory):
    """The folder of each kind of drafter by name."""
    root = tmp_path_factory.mktemp("originals")
    return {kind: save_drafter(trained(plain_pair, kind), root / kind) for kind in TRAINED}


def check_copy(pair: Pair, original: Path, change: Callable[[Path], Any], may_differ: bool) -> None:
    """Assert that a changed copy is refused in one line or drafts without failing, like the original if it has to."""
    drafts = []
    with tempfile.TemporaryDirectory() as root:
        copy = Path(shutil.copytree(original, Path(root) / original.name))
        change(copy)
        for folder in (copy, original):
            try:
                generation = Speculator(
                    with_drafter(pair, f"{original.name}:{folder}"), FixedLength(2), Settings(0.0, 6, 2)
                ).generate([3, 20, 4])
            except InputError as error:
                assert folder == copy and "\n" not in str(error) and len(str(error)) < 1000
                return
            drafts.append([(r.drafted, r.verified, r.accepted) for r in generation.rounds])
    assert may_differ or drafts[0] == drafts[1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(TRAINED)), file=st.sampled_from([DRAFTER_FILE, WEIGHTS_FILE, "README.md"]),
       start=st.floats(0.0, 1.0), removed=st.integers(0, 40), added=st.binary(max_size=40))  # fmt: skip
def test_changed_bytes_are_refused_or_change_no_draft(plain_pair, originals, kind, file, start, removed, added):
    def change(folder: Path) -> None:
        raw = (folder / file).read_bytes()
        at = int(start * len(raw))
        (folder / file).write_bytes(raw[:at] + added + raw[at + removed :])

    check_copy(plain_pair, originals[kind], change, may_differ=False)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(TRAINED)), data=st.data(), value=st.none() | st.booleans() | st.floats() | st.text() |
       st.sampled_from([-1, 0, 1, 2, 3, 16, 10**400, [], {}, [[[]]], "hydra"]))  # fmt: skip
def test_any_value_with_a_valid_checksum_is_refused_or_drafts(plain_pair, originals, kind, data, value):
    def forge(raw: dict[str, Any]) -> None:
        holder = data.draw(st.sampled_from([raw, raw["shape"], raw["files"], raw["metrics"]]))
        holder[data.draw(st.sampled_from(sorted(holder)))] = value

    check_copy(plain_pair, originals[kind], lambda folder: edit(folder, forge), may_differ=True)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(TRAINED)), at=st.floats(0.0, 1.0), value=st.floats(width=32))
def test_any_weight_with_a_valid_checksum_is_refused_or_drafts(plain_pair, originals, kind, at, value):
    def forge(tensors: dict[str, torch.Tensor]) -> None:
        flat = tensors[sorted(tensors)[int(at * (len(tensors) - 1))]].view(-1)
        flat[int(at * (len(flat) - 1))] = value

    check_copy(plain_pair, originals[kind], lambda folder: edit_weights(folder, forge), may_differ=True)
