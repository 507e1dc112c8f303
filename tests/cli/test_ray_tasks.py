"""`collect --ray`: what is refused; collecting by tasks is `benchmarks/ray_collect.py`, which needs Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import cli, files


@pytest.mark.parametrize("option", ["--dry-run", "--overwrite", "--repair"])
def test_options_that_do_not_go_with_tasks(tmp_path: Path, option: str) -> None:
    answer = cli(
        "collect", "--ray", "local", option, *(["--resume"] if option == "--repair" else []), "--out", tmp_path / "o"
    )
    expected = "specstop: --ray: expected neither --dry-run, --overwrite, --repair nor torchrun with it\n"
    assert (answer.code, answer.out, answer.err) == (2, "", expected)


def test_without_ray_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = cli("collect", "--ray", "local", "--quiet", "--out", tmp_path / "o")
    assert answer.code == 2
    assert answer.err == "specstop: --ray: Ray is not installed; python -m pip install 'specstop[ray]'\n"
    assert files(tmp_path) == {}
