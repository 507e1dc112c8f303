"""A rule that knows what steps cost, in the place of SGLang's adaptive draft steps (entry point `sglang.srt.plugins`).

SGLang (`--speculative-adaptive`, EAGLE and EAGLE3 with top-k 1) moves its draft steps by the mean accepted length and
thresholds. Here the number with the most tokens a second is taken: tokens by acceptance at each position, as seen in the last
steps and, at first, on the traces; seconds by a table. Both come with the JSON file of `--speculative-adaptive-config`,
under `specstop`; without that object SGLang's own rule runs as ever.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...policies.safe_loading import strict_loads

KEY = "specstop"
TARGET = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
MEMORY = 0.98
"""What a step's observations weigh in the next one."""


class CostedSteps:
    """SGLang's `AdaptiveSpecPolicy`: the steps of a batch by tokens a second.

    Args:
        candidates: numbers of steps that may be taken, by the batch size that they begin at.
        rule: `acceptance` by position (each given that all before were accepted), `strength`, how many observations it weighs
            as much as, and `seconds` of a step with 0, 1, 2, ... draft steps, by batch size.
    """

    def __init__(self, candidates: Mapping[int, Sequence[int]], rule: Mapping[str, Any]) -> None:
        self._candidates = {size: sorted(set(steps)) for size, steps in sorted(candidates.items())}
        self._sizes = list(self._candidates)
        self._prior = [float(p) for p in rule["acceptance"]]
        self._strength = float(rule["strength"])
        seconds = {int(size): [float(s) for s in row] for size, row in rule["seconds"].items()}
        self._seconds = dict(sorted(seconds.items()))
        longest, known = max(max(steps) for steps in self._candidates.values()), len(self._prior)
        if longest > known or any(len(row) <= longest for row in self._seconds.values()) or not self._seconds:
            raise ValueError(f"{KEY}: expected acceptance and seconds of all steps up to {longest}")
        self._tried, self._passed = [0.0] * known, [0.0] * known
        self._graphs: list[int] | None = None
        self._now: dict[int, int] = {}

    @property
    def candidate_steps(self) -> list[int]:
        """All numbers of steps that may be taken."""
        return sorted({step for steps in self._candidates.values() for step in steps})

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take in the batch sizes that are recorded: a batch is filled up to the next one."""
        self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the steps of a batch."""
        size = self._filled(batch_size)
        self._now[batch_size] = steps = max(self._allowed(size), key=lambda step: self._rate(size, step))
        return steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Take in what was accepted; return other steps where they are better now, else None."""
        before = self._now.get(batch_size)
        if before is None:
            before = self.get_steps_for_batch(batch_size)
        for position in range(before):
            # A position is tried where all before it were accepted.
            reached = sum(count >= position for count in num_correct_drafts_per_req)
            passed = sum(count > position for count in num_correct_drafts_per_req)
            self._tried[position] = MEMORY * self._tried[position] + reached
            self._passed[position] = MEMORY * self._passed[position] + passed
        after = self.get_steps_for_batch(batch_size)
        return None if after == before else after

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the recorded batch sizes that may take so many steps."""
        return None if self._graphs is None else [size for size in self._graphs if step in self._allowed(size)]

    def _allowed(self, size: int) -> list[int]:
        return self._candidates[self._sizes[max(0, bisect.bisect_right(self._sizes, size) - 1)]]

    def _filled(self, size: int) -> int:
        at = bisect.bisect_left(self._graphs, size) if self._graphs else 0
        return self._graphs[at] if self._graphs and at < len(self._graphs) else size

    def _rate(self, size: int, steps: int) -> float:
        """Return a request's tokens a second with so many steps."""
        tokens = survive = 1.0
        for tried, passed, prior in list(zip(self._tried, self._passed, self._prior, strict=True))[:steps]:
            # What was seen here, and the traces' acceptance with the weight of `strength` observations.
            survive *= (passed + self._strength * prior) / (tried + self._strength)
            tokens += survive
        return tokens / self._step_seconds(size, steps)

    def _step_seconds(self, size: int, steps: int) -> float:
        """Return the seconds of a step of a batch: of the sizes that are known those on either side, in between a line."""
        known = list(self._seconds)
        at = bisect.bisect_left(known, size)
        if at == 0 or at == len(known):
            return self._seconds[known[min(at, len(known) - 1)]][steps]
        low, high = known[at - 1], known[at]
        share = (size - low) / (high - low)
        return (1 - share) * self._seconds[low][steps] + share * self._seconds[high][steps]


def in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what SGLang makes its rule with: ours where the configuration has it, else the original."""

    def made(initial_steps: int, cfg_path: str | None = None) -> Any:
        raw = strict_loads(Path(cfg_path).read_text(encoding="utf-8")) if cfg_path else {}
        rule = raw.get(KEY)
        if rule is None:
            return original(initial_steps, cfg_path)
        return CostedSteps({int(k): v["candidate_steps"] for k, v in raw.items() if k.isdigit()}, rule)

    return made


def register() -> None:
    """Have SGLang ask `in_place_of` for its rule."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import adaptive_spec_params

    hook = in_place_of(adaptive_spec_params.AdaptiveSpeculativeParams)
    HookRegistry.register(TARGET, hook, HookType.REPLACE)


def rule_of(
    acceptance: Sequence[float], seconds: Mapping[int, Sequence[float]], strength: float = 200.0
) -> dict[str, Any]:
    """Return the object that a configuration has under `specstop`."""
    if not all(math.isfinite(value) for row in (acceptance, *seconds.values()) for value in row):
        raise ValueError("expected finite acceptance and seconds")
    return {
        "acceptance": [round(float(p), 6) for p in acceptance],
        "strength": strength,
        "seconds": {str(size): [float(f"{s:.6g}") for s in row] for size, row in seconds.items()},
    }
