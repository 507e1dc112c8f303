"""Folders of trained drafters: written whole, read strictly, refused in one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from attack_families import family
from small_drafters import CLASSES, TRAINED, new_round, proposed, small_network
from specstop.decode.drafters import find_drafter, with_drafter
from specstop.decode.drafters.folder import DRAFTER_FILE, WEIGHTS_FILE, TrainedDrafter, load_drafter, save_drafter
from specstop.decode.drafters.spec import warn_depth_limited
from specstop.decode.models.pair import Pair, join, load_pair
from specstop.decode.topology import chain
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.files import digest


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


def trained(pair: Pair, kind: str = "medusa") -> TrainedDrafter:
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network(kind, output.shape[1], pair.vocabulary, output)
    metrics = {"acceptance": [0.5, 0.25, 0.125], "held_out_loss": 2.5}
    return TrainedDrafter(kind, network, pair.fingerprint["target"], {"prompts": 3}, metrics)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_folder_is_read_as_it_was_written(pair: Pair, tmp_path: Path, kind: str) -> None:
    made = trained(pair, kind)
    read = load_drafter(save_drafter(made, tmp_path / "drafter"))
    assert (read.kind, read.target, read.provenance, read.metrics) == (kind, made.target, made.provenance, made.metrics)
    for name, tensor in made.network.state_dict().items():
        assert torch.equal(tensor, read.network.state_dict()[name]), name
    drafter = find_drafter(f"{kind}:{tmp_path / 'drafter'}", pair)
    assert type(drafter) is CLASSES[kind]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"# A {kind} drafter" in card and "0.500 0.250 0.125" in card and made.target in card


def test_it_is_known_by_its_target(pair: Pair, eager_pair: Pair, pair_folder: Path, tmp_path: Path) -> None:
    save_drafter(trained(pair), tmp_path / "drafter")
    find_drafter(f"medusa:{tmp_path / 'drafter'}", load_pair(pair_folder / "target", dtype="float64"))
    other = join(pair.draft_model, pair.draft_model)
    with pytest.raises(InputError, match=r"drafter: it was trained for the target .*, not for .*; train one for this"):
        find_drafter(f"medusa:{tmp_path / 'drafter'}", other)
    with pytest.raises(InputError, match="a drafter of the kind medusa; write medusa:"):
        find_drafter(f"hydra:{tmp_path / 'drafter'}", pair)
    with pytest.raises(InputError, match=r"drafter: .*none: expected the folder of a drafter"):
        find_drafter(f"hydra:{tmp_path / 'none'}", pair)


def test_an_engine_with_reordered_weights_has_the_same_drafter(pair_folder: Path, tmp_path: Path) -> None:
    """The compact and the packed engine hand out embeddings and output layer, and the drafter's weights are reordered too."""
    plain = load_pair(pair_folder / "target", engine="plain")
    for kind in TRAINED:
        save_drafter(trained(plain, kind), tmp_path / kind)
    rows: dict[str, list[torch.Tensor]] = {kind: [] for kind in TRAINED}
    for engine in ("plain", "packed", "compact"):
        pair = load_pair(pair_folder / "target", engine=engine)
        assert pair.fingerprint["target"] == plain.fingerprint["target"] and "draft" not in pair.fingerprint
        for kind in TRAINED:
            drafter: Any = find_drafter(f"{kind}:{tmp_path / kind}", pair)
            drafter.reserve(1, 32)
            rows[kind].append(_first_row(drafter))
    for some in rows.values():
        for other in some[1:]:
            torch.testing.assert_close(some[0], other, atol=2e-4, rtol=0)


@torch.inference_mode()
def _first_row(drafter: Any) -> torch.Tensor:
    drafter.committed(0, [5, 6, 7], torch.linspace(-1.0, 1.0, 48).view(3, 16))
    row: torch.Tensor = proposed(drafter, new_round([9], chain(2)), 0)
    return row.nan_to_num(neginf=-9.0)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], mend: bool = True) -> None:
    raw = json.loads((folder / DRAFTER_FILE).read_text())
    change(raw)
    if mend:
        raw["sha256"] = digest(raw)
    (folder / DRAFTER_FILE).write_text(json.dumps(raw))


def weigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights, and mend all checksums."""
    import hashlib

    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (folder / WEIGHTS_FILE).write_bytes(data)
    edit(folder, lambda raw: raw["files"].update({WEIGHTS_FILE: hashlib.sha256(data).hexdigest()}))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no json": (lambda f: (f / DRAFTER_FILE).unlink(), "drafter.json"),
    "no weights": (lambda f: (f / WEIGHTS_FILE).unlink(), "weights.safetensors"),
    "another schema": (lambda f: edit(f, lambda r: r.update(schema=2)), "schema"),
    "a lost key": (lambda f: edit(f, lambda r: r.pop("target")), "target"),
    "a key too many": (lambda f: edit(f, lambda r: r.update(auto_map=1)), "auto_map"),
    "another type": (lambda f: edit(f, lambda r: r.update(shape=[4])), "shape"),
    "an edit": (lambda f: edit(f, lambda r: r.update(target="x"), False), "its checksum differs"),
    "an unknown kind": (lambda f: edit(f, lambda r: r.update(kind="eagle")), "kind"),
    "a huge shape": (lambda f: edit(f, lambda r: r["shape"].update(hidden=10**9)), "hidden"),
    "a shape of words": (lambda f: edit(f, lambda r: r["shape"].update(depth="3")), "depth"),
    "a lost size": (lambda f: edit(f, lambda r: r["shape"].pop("hidden")), "hidden"),
    "another shape": (lambda f: edit(f, lambda r: r["shape"].update(depth=2)), "blocks.2.bias"),
    "other weights": (lambda f: (f / WEIGHTS_FILE).write_bytes(b"0" * 64), "weights.safetensors"),
    "too much": (lambda f: (f / WEIGHTS_FILE).write_bytes(bytes(1 << 25)), "expected at most"),
    "a pickle": (lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01."), "not listed in drafter.json"),
    "code": (lambda f: (f / "drafter.py").write_text("1/0"), "not listed in drafter.json"),
    "not finite": (lambda f: weigh(f, lambda t: t["blocks.0.bias"].fill_(torch.nan)), "blocks.0.bias"),
    "half of it": (lambda f: weigh(f, lambda t: t.update({"blocks.0.bias": torch.zeros(16).half()})), "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(pair: Pair, tmp_path: Path, name: str) -> None:
    damage, why = BROKEN[name]
    folder = save_drafter(trained(pair), tmp_path / "drafter")
    damage(folder)
    with pytest.raises(InputError) as error:
        load_drafter(folder)
    message = str(error.value)
    assert message.startswith(f"drafter: {folder}: ") and "\n" not in message
    assert why in message


def test_a_layer_needs_heads_that_divide_its_width(pair: Pair, tmp_path: Path) -> None:
    folder = save_drafter(trained(pair, "layer"), tmp_path / "drafter")
    edit(folder, lambda raw: raw["shape"].update(attention_heads=3))
    with pytest.raises(InputError, match="a layer of width 16 cannot have 3 heads"):
        load_drafter(folder)
    assert dataclasses.is_dataclass(trained(pair))


def test_loops_share_a_network_as_long_as_its_folder_has_the_same_contents(plain_pair: Pair, tmp_path: Path) -> None:
    def network(name: str) -> Any:
        drafter: Any = find_drafter(f"medusa:{tmp_path / name}", plain_pair)
        return drafter._network

    save_drafter(trained(plain_pair), tmp_path / "d")
    save_drafter(trained(plain_pair), tmp_path / "copy")
    first = network("d")
    assert network("d") is first and network("copy") is first
    save_drafter(dataclasses.replace(trained(plain_pair), provenance={"seed": 3}), tmp_path / "d")
    assert network("d") is not first


@pytest.mark.parametrize("before", ["", "suffix+"])
def test_a_drafter_that_does_not_reach_the_depth_is_warned_of(plain_pair: Pair, tmp_path: Path, before: str) -> None:
    save_drafter(trained(plain_pair), tmp_path / "d")
    with pytest.warns(SpecstopWarning, match="proposes 3 tokens at most"):
        warn_depth_limited(with_drafter(plain_pair, f"{before}medusa:{tmp_path / 'd'}"), 5)


def test_damaged_folders_are_refused_or_draft_as_before(tmp_path: Path) -> None:
    """A seeded sample of `tests/attacks`."""
    seen, faults = family("drafter_folders").attack(60, 7, tmp_path)
    assert faults == []
    assert sum(seen.values()) == 60 and sum(n for name, n in seen.items() if name.endswith("refused")) > 30
