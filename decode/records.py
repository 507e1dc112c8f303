"""What the loop reports: a record of each round, texts with their rounds, and figures of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..policies.errors import PolicyFailure


class Round(NamedTuple):
    """One round of one sequence.

    Attributes:
        anchor: tokens generated before the round; the anchor is the last committed token.
        context: committed tokens before the round, prompt included.
        drafted, verified, accepted: tokens drawn, sent to the target, min(A, k).
        committed: tokens added to the text; accepted + 1 unless the text ended.
        decisions: number of calls of the policy.
        backlog: committed tokens that the draft had not read when the round began.
        cut: an end of text or a length limit ended the round.
        first_draft_s, draft_s: seconds of the first draft step, and of the others together.
        verify_s, policy_s: seconds of verification, and of features and decisions.
        seconds: of the whole round.
        together: number of streams in the round. They share one verification, and its seconds are divided equally.
        deepest: largest depth of the tokens sent; equal to `verified` for a chain.
        drafter: index of the drafter that drafted, of those that the policy chooses from; -1 = none or several.
        later_steps, later_rows: draft steps after the first, and tokens that the draft read in them together.
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
    drafter: int = -1
    later_steps: int = 0
    later_rows: int = 0

    @property
    def outside_s(self) -> float:
        """Seconds outside model calls and policy."""
        return self.seconds - self.first_draft_s - self.draft_s - self.verify_s - self.policy_s


@dataclass(frozen=True)
class Generation:
    """The text of one stream.

    Attributes:
        tokens: generated ids, EOS included.
        rounds: in order.
        prompt_tokens: length of the prompt.
        prefill_s: seconds of reading the prompt with the target.
        seconds: of everything.
        text: decoded tokens without special ones; None if there was no tokenizer.
        failure: error of the policy after which a fixed length was drafted; None if it has not failed.
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
        text = "" if self.text is None else f", {self.text[:40]!r}"
        return (
            f"Generation({len(self.tokens)} tokens, {len(self.rounds)} rounds, {self.tokens_per_s:.1f} tokens/s{text})"
        )


class Tally:
    """Sums over generations.

    Attributes:
        texts, tokens: numbers of generations and of generated tokens.
        rounds: of all generations.
        prefill_s, seconds: of reading prompts, and of everything.
        failure: the first failure of a policy; None if there was none.
    """

    def __init__(self, generations: Iterable[Generation] = ()) -> None:
        generations = list(generations)
        self.texts, self.tokens = len(generations), sum(len(one.tokens) for one in generations)
        self.rounds = [record for one in generations for record in one.rounds]
        self.prefill_s = sum((one.prefill_s for one in generations), 0.0)
        self.seconds = sum((one.seconds for one in generations), 0.0)
        self.failure = next((one.failure for one in generations if one.failure), None)

    def total(self, name: str) -> Any:
        """Return the sum of an attribute of the rounds."""
        return sum(getattr(record, name) for record in self.rounds)

    @property
    def target_calls(self) -> int:
        """Number of verifications, one for all streams of a batch; reading a prompt is not one."""
        return round(sum(1.0 / record.together for record in self.rounds))

    @property
    def block_efficiency(self) -> float:
        """Committed tokens of a text per target call."""
        return float(self.total("committed")) / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all seconds."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def acceptance(self) -> list[tuple[int, float, int]]:
        """Return (depth k, P(A >= k) among rounds that verified so deep, number of these) without rounds that were cut."""
        rounds = [(record.deepest, record.accepted) for record in self.rounds if not record.cut]
        table = []
        for depth in range(1, max((deepest for deepest, _ in rounds), default=0) + 1):
            accepted = [accepted >= depth for deepest, accepted in rounds if deepest >= depth]
            table.append((depth, sum(accepted) / len(accepted), len(accepted)))
        return table

    def by_drafter(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of rounds in which each of these drafters drafted alone, several of them, or none.

        Args:
            names: of the drafters; without any, there is nothing to count.
        """
        if not names:
            return {}
        counts = {name: sum(record.drafter == index for record in self.rounds) for index, name in enumerate(names)}
        others = [record.drafted > 0 for record in self.rounds if record.drafter < 0]
        return counts | {"several": sum(others), "none": len(others) - sum(others)}

    def shares(self) -> dict[str, float]:
        """Return the seconds by phase: prefill, draft, verify, policy, outside."""
        return {
            "prefill": self.prefill_s,
            "draft": self.total("first_draft_s") + self.total("draft_s"),
            **{phase: float(self.total(f"{phase}_s")) for phase in ("verify", "policy", "outside")},
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run, for tables and JSON, and whether the policy failed."""
        drafted, verified, accepted = (self.total(name) for name in ("drafted", "verified", "accepted"))
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "target_calls": self.target_calls,
            "block_efficiency": self.block_efficiency,
            "drafted": drafted,
            "verified": verified,
            "accepted": accepted,
            "wasted": drafted - accepted,
            **{f"{name}_s": seconds for name, seconds in self.shares().items()},
            **({"failed": False} if self.failure is None else self.failure.to_dict()),
        }
