"""Folders of trained drafters: a round trip, the target that they belong to, and damaged ones refused in one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_drafters import CLASSES, TRAINED, new_round, proposed, small_network
from specstop.decode.drafters import find_drafter, with_drafter
from specstop.decode.drafters.folder import DRAFTER_FILE, WEIGHTS_FILE, TrainedDrafter, load_drafter, save_drafter
from specstop.decode.drafters.spec import warn_depth_limited
from specstop.decode.models.pair import Pair, join, load_pair
from specstop.decode.topology import chain
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.files import digest


@pytest.fixture(scope="session")
def pair(plain_pair):
    return plain_pair


def trained(pair: Pair, kind: str = "medusa") -> TrainedDrafter:
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network(kind, output.shape[1], pair.vocabulary, output)
    metrics = {"acceptance": [0.5, 0.25, 0.125], "held_out_loss": 2.5}
    return TrainedDrafter(kind, network, pair.fingerprint["target"], {"prompts": 3}, metrics)


@pytest.fixture
def folder(pair, tmp_path):
    return save_drafter(trained(pair), tmp_path / "drafter")


@pytest.mark.parametrize("kind", TRAINED)
def test_a_folder_is_read_as_it_was_written(pair, tmp_path, kind):
    written = trained(pair, kind)
    read = load_drafter(save_drafter(written, tmp_path / "drafter"))
    for name in ("kind", "target", "provenance", "metrics"):
        assert getattr(read, name) == getattr(written, name)
    torch.testing.assert_close(read.network.state_dict(), written.network.state_dict(), rtol=0, atol=0)
    assert type(find_drafter(f"{kind}:{tmp_path / 'drafter'}", pair)) is CLASSES[kind]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert kind in card and "0.500 0.250 0.125" in card and written.target in card


def test_a_drafter_belongs_to_its_target_in_any_engine(pair_folder, tmp_path):
    """Engines reorder embeddings and output layer; the drafter's weights are reordered too."""
    pairs = [load_pair(pair_folder / "target", engine=engine) for engine in ("plain", "packed", "compact")]
    for kind in TRAINED:
        save_drafter(trained(pairs[0], kind), tmp_path / kind)
        rows = []
        for pair in pairs:
            drafter: Any = find_drafter(f"{kind}:{tmp_path / kind}", pair)
            drafter.reserve(1, 32)
            with torch.inference_mode():
                drafter.committed(0, [5, 6, 7], torch.linspace(-1.0, 1.0, 48).view(3, 16))
                rows.append(proposed(drafter, new_round([9], chain(2)), 0).nan_to_num(neginf=-9.0))
        for row in rows[1:]:
            torch.testing.assert_close(rows[0], row, atol=2e-4, rtol=0)


def test_another_target_kind_or_place_or_number_of_heads_is_refused(pair, folder, tmp_path):
    layer = save_drafter(trained(pair, "layer"), tmp_path / "layer")
    edit(layer, lambda raw: raw["shape"].update(attention_heads=3))
    with pytest.raises(InputError, match="3 heads"):
        load_drafter(layer)
    other = join(pair.draft_model, pair.draft_model)
    for spec, used, noun in (
        (f"medusa:{folder}", other, "target"), (f"hydra:{folder}", pair, "medusa"), (f"hydra:{folder}/none", pair, "none"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^drafter.*{noun}"):
            find_drafter(spec, used)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], has_checksum: bool = True) -> None:
    raw = json.loads((folder / DRAFTER_FILE).read_text())
    change(raw)
    if has_checksum:
        raw["sha256"] = digest(raw)
    (folder / DRAFTER_FILE).write_text(json.dumps(raw))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights and correct all checksums."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (folder / WEIGHTS_FILE).write_bytes(data)
    edit(folder, lambda raw: raw["files"].update({WEIGHTS_FILE: hashlib.sha256(data).hexdigest()}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no json": (lambda f: (f / DRAFTER_FILE).unlink(), "drafter.json"),
    "another schema": (lambda f: edit(f, lambda r: r.update(schema=2)), "schema"),
    "an unknown key": (lambda f: edit(f, lambda r: r.update(auto_map=1)), "auto_map"),
    "an edit": (lambda f: edit(f, lambda r: r.update(target="x"), False), "checksum"),
    "an unknown kind": (lambda f: edit(f, lambda r: r.update(kind="eagle")), "kind"),
    "a huge size": (lambda f: edit(f, lambda r: r["shape"].update(hidden=10**9)), "hidden"),
    "another depth": (lambda f: edit(f, lambda r: r["shape"].update(depth=2)), "blocks.2.bias"),
    "large weights": (lambda f: (f / WEIGHTS_FILE).write_bytes(bytes(1 << 25)), "at most"),
    "a pickle": (lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01."), "pytorch_model.bin"),
    "code": (lambda f: (f / "drafter.py").write_text("1/0"), "drafter.py"),
    "not finite": (lambda f: edit_weights(f, lambda t: t["blocks.0.bias"].fill_(torch.nan)), "blocks.0.bias"),
    "half": (lambda f: edit_weights(f, lambda t: t.update({"blocks.0.bias": torch.zeros(16).half()})), "float32"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(folder, name):
    damage, noun = DAMAGES[name]
    damage(folder)
    with pytest.raises(InputError, match=f"^drafter: .*{noun}") as error:
        load_drafter(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("before", ["", "suffix+"])
def test_a_drafter_that_does_not_reach_the_depth_causes_a_warning(pair, folder, before):
    with pytest.warns(SpecstopWarning, match="3 tokens"):
        warn_depth_limited(with_drafter(pair, f"{before}medusa:{folder}"), 5)
