"""A key that occurs twice is refused by name in what commands read: parsers disagree about which of the two counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import cli
from conftest import VOCABULARY
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.schema import Header
from specstop.decode.drafters.folder import load_drafter
from specstop.decode.engines.vllm_plugin import read_coefficients
from specstop.decode.models.pair import load_pair
from specstop.policies.errors import SpecstopError
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.report_comparison import read_report

TWICE = '{"kind": "any", "slope": 1, "slope": 2}'


def _folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).write_text(TWICE)
    return tmp_path


READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: Profile.load(_folder(path, "profile.json") / "profile.json"),
    "header of a trace": lambda path: Header.from_json(TWICE, "header.json"),
    "policy": lambda path: load_policy_folder(_folder(path, "policy.json")),
    "drafter": lambda path: load_drafter(_folder(path, "drafter.json")),
    "report": lambda path: read_report(_folder(path, "report.json")),
    "coefficients": lambda path: read_coefficients(_folder(path, "acceptance.json") / "acceptance.json"),
    "records": lambda path: import_vllm(_folder(path, "records.jsonl") / "records.jsonl", path / "out"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_json(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(SpecstopError, match="'slope' occurs twice"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_config_of_a_model(pair_folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(pair_folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "target" / name
    raw = json.loads(file.read_text())
    file.write_text(f'{{"vocab_size": {VOCABULARY - 1}, "vocab_size": {VOCABULARY}, {json.dumps(raw)[1:]}')
    with pytest.raises(SpecstopError, match=f"target: .*{name}: the key 'vocab_size' occurs twice"):
        load_pair(tmp_path / "target", tmp_path / "draft")


@pytest.mark.parametrize("text", ["max_new_tokens: 4\nmax_new_tokens: 8\n", "max-new-tokens: 4\nmax_new_tokens: 8\n"])
def test_config_of_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    answer = cli("decode", "--config", tmp_path / "run.yaml")
    assert answer.code == 2
    assert "twice" in answer.err
