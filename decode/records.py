"""What the loop reports: one record per round, their sums, and the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..policies.errors import PolicyFailure


class Round(NamedTuple):
    """One round of one sequence.

    Attributes:
        anchor: tokens generated before the round; the anchor is the last committed token.
        context: committed tokens before the round, prompt included.
        drafted, verified, accepted: tokens drawn, sent to the target, min(A, k).
        committed: tokens added to the text; accepted + 1 unless the text ended.
        decisions: times the policy was asked.
        backlog: committed tokens the draft had not read when the round began.
        cut: the round met EOS or a length limit.
        first_draft_s, draft_s: seconds of the first draft step, of the other ones together.
        verify_s, policy_s: seconds of verification, of features and decisions.
        seconds: of the whole round.
        together: streams that shared it: one verification of the target for all.
        deepest: depth of the tokens sent that lie deepest; of a chain that is `verified`.
    """

    anchor: int
    context: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    decisions: int
    backlog: int
    cut: bool
    first_draft_s: float
    draft_s: float
    verify_s: float
    policy_s: float
    seconds: float
    together: int = 1
    deepest: int = 0

    @property
    def outside_s(self) -> float:
        """Seconds outside model calls and policy."""
        return self.seconds - self.first_draft_s - self.draft_s - self.verify_s - self.policy_s


@dataclass(frozen=True)
class Generation:
    """The text of one stream and how it came about.

    Attributes:
        tokens: generated ids, EOS included.
        rounds: in order.
        prompt_tokens: length of the prompt.
        prefill_s: seconds of reading the prompt with the target.
        seconds: of everything.
        text: of the tokens, special ones left out; None where nobody had a tokenizer.
        failure: of the policy, in place of which a fixed length was drafted from there on; None = it has not failed.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    prompt_tokens: int
    prefill_s: float
    seconds: float
    text: str | None = None
    failure: PolicyFailure | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all seconds."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        """Return what it amounts to: hundreds of rounds are no answer at a prompt."""
        begins = "" if self.text is None else f", {self.text[:40]!r}"
        return f"Generation({len(self.tokens)} tokens, {len(self.rounds)} rounds, {self.tokens_per_s:.1f} tokens/s{begins})"


@dataclass
class Tally:
    """Sums over generations, and the numbers a user looks for."""

    tokens: int = 0
    texts: int = 0
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    seconds: float = 0.0
    failure: PolicyFailure | None = None

    def add(self, generation: Generation) -> None:
        """Count one more generation."""
        self.tokens += len(generation.tokens)
        self.texts += 1
        self.rounds.extend(generation.rounds)
        self.prefill_s += generation.prefill_s
        self.seconds += generation.seconds
        self.failure = self.failure or generation.failure

    @staticmethod
    def of(generations: Sequence[Generation]) -> Tally:
        """Return the sums over `generations`."""
        tally = Tally()
        for generation in generations:
            tally.add(generation)
        return tally

    @property
    def target_calls(self) -> int:
        """Verifications, one for all streams of a batch; reading the prompt is not one."""
        return round(sum(1.0 / r.together for r in self.rounds))

    @property
    def block_efficiency(self) -> float:
        """Committed tokens of a text by target call."""
        committed = sum(r.committed for r in self.rounds)
        return committed / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all seconds."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def acceptance(self) -> list[tuple[int, float, int]]:
        """Return (depth k, P(A >= k) among rounds that verified so deep, their number); cut rounds are left out."""
        rounds = [r for r in self.rounds if not r.cut]
        table = []
        for depth in range(1, max((r.deepest for r in rounds), default=0) + 1):
            reached = [r for r in rounds if r.deepest >= depth]
            table.append((depth, sum(r.accepted >= depth for r in reached) / len(reached), len(reached)))
        return table

    def shares(self) -> dict[str, float]:
        """Return the seconds by phase: prefill, draft, verify, policy, outside."""
        return {
            "prefill": self.prefill_s,
            "draft": sum(r.first_draft_s + r.draft_s for r in self.rounds),
            "verify": sum(r.verify_s for r in self.rounds),
            "policy": sum(r.policy_s for r in self.rounds),
            "outside": sum(r.outside_s for r in self.rounds),
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run, for tables and JSON, and whether the policy failed."""
        drafted, verified = sum(r.drafted for r in self.rounds), sum(r.verified for r in self.rounds)
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "target_calls": self.target_calls,
            "block_efficiency": self.block_efficiency,
            "drafted": drafted,
            "verified": verified,
            "accepted": sum(r.accepted for r in self.rounds),
            "wasted": drafted - sum(r.accepted for r in self.rounds),
            **{f"{name}_s": seconds for name, seconds in self.shares().items()},
            **({"failed": False} if self.failure is None else self.failure.to_dict()),
        }
