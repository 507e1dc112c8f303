"""What a drafter is measured on: exact traces of its chains and trees over training and test prompts, and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specstop.collect.prompts import Prompt, encode
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode import Pair, with_drafter
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies.display import Progress
from specstop.policies.profile import Profile
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays


@dataclass(frozen=True)
class Ground:
    """Where all drafters are measured, at one temperature.

    Attributes:
        pair: with its draft.
        fit, test: prompts.
        tokens, depth, tree, temperature: of texts, chains and trees.
        effort: of profiles.
        sizes: nodes of the trees that a learned choice may draft.
        room: for traces.
        progress: see `Progress`.
    """

    pair: Pair
    fit: list[Prompt]
    test: list[Prompt]
    tokens: int
    depth: int
    tree: str
    temperature: float
    effort: Effort
    sizes: Sequence[int]
    room: Path
    progress: Progress
    _held: dict[tuple[str, str | None], tuple[Trace, TraceArrays]] = field(default_factory=dict)
    _profiles: dict[str, Profile] = field(default_factory=dict)

    def traces(self, drafter: str, tree: str | None = None) -> tuple[Trace, TraceArrays]:
        """Return the trace of a drafter's chains or trees over the training prompts, and that over the test prompts."""
        if (drafter, tree) not in self._held:
            pair, made = with_drafter(self.pair, drafter), []
            for prompts in (self.fit, self.test):
                folder = self.room / f"T{self.temperature:g}-{len(self._held)}-{len(made)}"
                made.append(
                    collect(
                        pair, prompts, folder, depth=self.depth, tree=tree, temperature=self.temperature,
                        max_new_tokens=self.tokens, verification="match", draft=drafter, progress=self.progress,
                    )
                )  # fmt: skip
            self._held[drafter, tree] = made[0], trace_arrays(made[1])
        return self._held[drafter, tree]

    def profile(self, drafter: str) -> Profile:
        """Return what rounds with a drafter cost, chains and trees; texts of training prompts are timed."""
        if drafter not in self._profiles:
            self._profiles[drafter] = measure_profile(
                with_drafter(self.pair, drafter), self.ids(self.fit), depth=self.depth, tree=self.tree,
                temperature=self.temperature, effort=self.effort, verification="match", progress=self.progress,
            )  # fmt: skip
        return self._profiles[drafter]

    def ids(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts."""
        return encode(prompts, self.pair.tokenizer, self.pair.readable - self.tokens - 64)
