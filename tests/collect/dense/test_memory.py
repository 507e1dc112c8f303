"""How much memory dense collection takes where it is not told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from specstop.collect.dense import memory
from specstop.collect.dense.memory import LEAST_MIB, MOST_MIB, SHARE, UNKNOWN_MIB, budget_mib, free_bytes
from specstop.collect.prompts import Prompt
from specstop.collect.run import plan_run
from specstop.decode.models.pair import Pair

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "free", "budget"),
    [
        ("cpu", 8 << 30, int(8192 * SHARE["cpu"])),
        ("cpu", 1 << 20, LEAST_MIB),
        ("cpu", 1 << 50, MOST_MIB["cpu"]),
        ("cuda", 40 << 30, int(40960 * SHARE["cuda"])),
        ("cuda", 1 << 50, MOST_MIB["cuda"]),
        ("cpu", None, UNKNOWN_MIB),
    ],
)
def test_the_budget_is_a_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, device: str, free: int | None, budget: int
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert budget_mib(torch.device(device)) == budget


def test_a_gpu_says_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    assert free_bytes(torch.device("cuda:1")) == 3 << 30
    assert free_bytes(torch.device("meta")) is None


def test_the_host_is_asked_for_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", file)
    assert free_bytes(CPU) is None
    file.write_text("MemTotal:  900 kB\nMemFree: 10 kB\nMemAvailable:     640 kB\n")
    assert free_bytes(CPU) == 640 << 10
    file.write_text("MemTotal:  900 kB\n")
    assert free_bytes(CPU) is None


def test_the_header_tells_it(pair: Pair, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 << 30)
    assert plan_run(pair, prompts[:2], depth=2, max_new_tokens=4).header.facts["memory MiB"] == 512
    assert plan_run(pair, prompts[:2], depth=2, max_new_tokens=4, memory=70).header.facts["memory MiB"] == 70
    assert "memory MiB" not in plan_run(pair, prompts[:2], depth=2, max_new_tokens=4, collector="live").header.facts
