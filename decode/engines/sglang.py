"""A cost-aware rule instead of SGLang's adaptive draft steps (entry point `sglang.srt.plugins`).

SGLang (`--speculative-adaptive`, EAGLE and EAGLE3 with top-k 1) changes its number of draft steps by thresholds on the mean
accepted length. This rule takes the number with the most tokens per second: tokens by the acceptance of each position, from
the last steps and from the traces; seconds from a table. Both are in the JSON file of `--speculative-adaptive-config`, under
`specstop`. Without that entry, SGLang's built-in rule is used.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.files import strict_loads

KEY = "specstop"
TARGET = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
MEMORY = 0.98
"""Weight of earlier observations after each step."""


class CostedSteps:
    """SGLang's `AdaptiveSpecPolicy`: the number of draft steps of a batch with the most tokens per second.

    Args:
        candidates: numbers of steps to choose from, by the smallest batch size that they apply to.
        rule: `acceptance` by position (each given that all positions before were accepted), `strength`, its weight as a
            number of observations, and `seconds` of a step with 0, 1, 2, ... draft steps, by batch size.
    """

    def __init__(self, candidates: Mapping[int, Sequence[int]], rule: Mapping[str, Any]) -> None:
        self._candidates = {size: sorted(set(steps)) for size, steps in sorted(candidates.items())}
        self._prior, self._strength = np.array(rule["acceptance"], dtype=float), float(rule["strength"])
        seconds = {int(size): list(map(float, row)) for size, row in rule["seconds"].items()}
        longest = max(self.candidate_steps)
        if not seconds or longest > min(len(self._prior), *(len(row) - 1 for row in seconds.values())):
            raise ValueError(f"{KEY}: expected acceptance and seconds of all steps up to {longest}")
        self._seconds = dict(sorted(seconds.items()))
        self._tried, self._passed = np.zeros((2, len(self._prior)))
        self._graphs: list[int] | None = None
        self._current: dict[int, int] = {}

    @property
    def candidate_steps(self) -> list[int]:
        """All numbers of steps that may be chosen."""
        return sorted({step for steps in self._candidates.values() for step in steps})

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Set the batch sizes with CUDA graphs: a batch is padded to the next one."""
        self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the number of steps for a batch."""
        at = bisect.bisect_left(self._graphs or [], batch_size)
        size = self._graphs[at] if self._graphs and at < len(self._graphs) else batch_size
        # Acceptance: observed here, and the prior with the weight of `strength` observations.
        acceptance = (self._passed + self._strength * self._prior) / (self._tried + self._strength)
        tokens = 1.0 + np.concatenate([[0.0], acceptance.cumprod().cumsum()])  # by number of steps
        sizes = list(self._seconds)

        def rate(steps: int) -> float:
            return float(tokens[steps] / np.interp(size, sizes, [row[steps] for row in self._seconds.values()]))

        self._current[batch_size] = steps = max(self._allowed(size), key=rate)
        return steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Observe a verification; return a new number of steps, or None."""
        before = self._current.get(batch_size)
        before = self.get_steps_for_batch(batch_size) if before is None else before
        counts = np.array(num_correct_drafts_per_req)[:, None]
        position = np.arange(before)  # tried if all positions before were accepted
        self._tried[:before] = MEMORY * self._tried[:before] + (counts >= position).sum(0)
        self._passed[:before] = MEMORY * self._passed[:before] + (counts > position).sum(0)
        after = self.get_steps_for_batch(batch_size)
        return None if after == before else after

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the batch sizes with CUDA graphs that may use this number of steps."""
        return None if self._graphs is None else [size for size in self._graphs if step in self._allowed(size)]

    def _allowed(self, size: int) -> list[int]:
        sizes = list(self._candidates)
        return self._candidates[sizes[max(0, bisect.bisect_right(sizes, size) - 1)]]


def costed_steps_factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of `CostedSteps` if the configuration has the entry `specstop`, otherwise of SGLang's rule."""

    def create(initial_steps: int, cfg_path: str | None = None) -> Any:
        raw = strict_loads(Path(cfg_path).read_text(encoding="utf-8")) if cfg_path else {}
        if KEY not in raw:
            return original(initial_steps, cfg_path)
        return CostedSteps({int(k): v["candidate_steps"] for k, v in raw.items() if k.isdigit()}, raw[KEY])

    return create


def register() -> None:
    """Replace SGLang's rule by `costed_steps_factory`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import adaptive_spec_params

    hook = costed_steps_factory(adaptive_spec_params.AdaptiveSpeculativeParams)
    HookRegistry.register(TARGET, hook, HookType.REPLACE)


def rule_entry(
    acceptance: Sequence[float], seconds: Mapping[int, Sequence[float]], strength: float = 200.0
) -> dict[str, Any]:
    """Return the entry `specstop` of a configuration."""
    if not all(math.isfinite(value) for row in (acceptance, *seconds.values()) for value in row):
        raise ValueError("expected finite acceptance and seconds")
    return {
        "acceptance": [round(float(p), 6) for p in acceptance],
        "strength": strength,
        "seconds": {str(size): [float(f"{s:.6g}") for s in row] for size, row in seconds.items()},
    }
