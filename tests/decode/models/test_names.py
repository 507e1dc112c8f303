"""What --target and --draft name: a folder, a hub name, or something that is refused at once with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from specstop.decode.models import loading
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import PairError


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that cannot be reached; the list collects what it is asked for."""
    asked: list[str] = []

    def unreachable(name: str, **_: object) -> None:
        asked.append(name)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading, "model_info", unreachable)
    return asked


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("x.gguf", "x.gguf", "gguf_file="),
        ("x.gguf", ".", "gguf_file="),
        ("model.safetensors", "model.safetensors", "config.json"),
    ],
)
def test_what_is_no_model_folder_is_refused(tmp_path: Path, file: str, name: str, message: str) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    with pytest.raises(PairError, match=f"target: .*{message}"):
        load_pair(tmp_path / name)


def test_a_name_below_a_local_folder_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(PairError, match=r"target: .*m/q3 does not exist"):
        load_pair("m/q3")
    assert not online


def test_an_unreachable_hub_is_one_line_after_one_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PairError, match=r"target: .*someone/thing does not exist here, nor is it on the hub: .*not known"
    ):
        load_pair("someone/thing")
    assert len(online) == 1


def test_a_cached_model_needs_no_hub(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: list[str]
) -> None:
    snapshot = Path(shutil.copytree(pair_folder / "target", tmp_path / "snapshot"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda _, file: str(snapshot / file))
    assert load_pair("someone/thing").draft is None
    assert len(online) == 1


@pytest.mark.parametrize("name", ["some one/thing", "a--b/c", "x/.."])
def test_a_name_that_no_repository_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PairError, match="target: expected a model folder or a hub name"):
        load_pair(name)


def test_a_hub_that_is_switched_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PairError, match="HF_HUB_OFFLINE"):
        load_pair("someone/thing")


@pytest.mark.parametrize("model_type", ["nobody_knows", None])
def test_code_of_a_folder_is_not_run_and_not_advised(pair_folder: Path, tmp_path: Path, model_type: str | None) -> None:
    folder = Path(shutil.copytree(pair_folder / "target", tmp_path / "target"))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": model_type, "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "code.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(PairError, match="never run") as caught:
        load_pair(folder)
    assert "trust_remote_code" not in str(caught.value)


def test_a_pair_that_cannot_fit_is_refused_before_it_is_loaded(
    pair_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair_folder / "target", pair_folder / "draft"
    weights = sum(p.numel() for p in load_pair(target, draft, engine="plain").target.parameters())
    monkeypatch.setattr(loading, "available_bytes", lambda device: 2 * weights * 4)
    load_pair(target, draft)
    load_pair(target, draft, dtype="bfloat16")
    monkeypatch.setattr(loading, "available_bytes", lambda device: 2 * weights * 4 - 1)
    with pytest.raises(PairError, match=r"target and draft: float32 .*GB .*`dtype` bfloat16.*`device_map`"):
        load_pair(target, draft)
    load_pair(target, draft, dtype="bfloat16")
    load_pair(target)
    load_pair(target, draft, device_map="auto")


def test_weights_that_the_model_has_no_place_for_need_no_memory(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(pair_folder / "target", tmp_path / "target"))
    tensors = load_file(folder / "model.safetensors")
    need = sum(tensor.numel() for tensor in tensors.values()) * 4
    save_file({**tensors, "tower.weight": torch.zeros(1000)}, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(loading, "available_bytes", lambda device: need)
    load_pair(folder)


def test_available_memory_is_known_here() -> None:
    available = loading.available_bytes(torch.device("cpu"))
    assert available is None or available > 1 << 20
    assert loading.available_bytes(torch.device("meta")) is None
