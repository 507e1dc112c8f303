"""Trials of `train --tune`: a head with its hyper-parameters and rule, or a policy spec with ranges, as optuna draws them.

What a trial came to is kept in optuna's own record of it, so that a search that was interrupted goes on from its file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ....policies.errors import InputError
from ...heads import HEADS, head_class

if TYPE_CHECKING:
    import optuna

RECORD = "trial"


@dataclass(frozen=True)
class Trial:
    """One setting and how it replays on prompts left out.

    Attributes:
        name: the head, or the policy's spec.
        rule: of a head; "" for a spec.
        params: hyper-parameters, or parameters of the spec.
        rate: tokens per second over the folds done.
        ratio: to the best fixed length, chosen on the same folds.
        folds: done; fewer than the others where the trial was behind.
        error: why it could not be run, or "".
    """

    name: str
    rule: str
    params: Mapping[str, Any]
    rate: float = 0.0
    ratio: float = 0.0
    folds: int = 0
    error: str = ""

    def record(self, drawn: optuna.Trial) -> None:
        """Keep what came of the trial in optuna's record of it."""
        drawn.set_user_attr(RECORD, asdict(self))  # in one piece: the process may be killed at any moment

    @classmethod
    def recorded(cls, frozen: optuna.trial.FrozenTrial) -> Trial | None:
        """Return the trial that `record` kept; None of one that was interrupted."""
        return cls(**frozen.user_attrs[RECORD]) if RECORD in frozen.user_attrs else None

    def row(self, at: int) -> dict[str, Any]:
        """Return the trial as a row of plain JSON."""
        return {
            "trial": at,
            "policy": self.name,
            "rule": self.rule or None,
            "parameters": ", ".join(f"{k}={_short(v)}" for k, v in self.params.items()) or None,
            "tokens_per_s": self.rate,
            "ratio_to_best_fixed": self.ratio,
            "folds": self.folds,
            **({"error": self.error} if self.error else {}),
        }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class HeadSpace:
    """Heads, rules and hyper-parameters to draw from; `count` trials of them."""

    heads: tuple[str, ...]
    rules: tuple[str, ...]
    count: int

    def __post_init__(self) -> None:
        known = HEADS.names()
        unknown = [head for head in self.heads if head not in known]
        if unknown:
            raise InputError(f"--head: expected some of {', '.join(known)}, not {unknown[0]!r}")

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """What is chosen among, whatever the number of trials."""
        return {"head": self.heads, "rule": self.rules}

    def first(self) -> list[dict[str, Any]]:
        """Return what is tried first: each head under each rule, with its own hyper-parameters."""
        return [{"rule": rule, "head": head, "drawn": False} for rule in self.rules for head in self.heads]

    def draw(self, trial: optuna.Trial) -> Trial:
        """Return the next trial."""
        rule, head = trial.suggest_categorical("rule", self.rules), trial.suggest_categorical("head", self.heads)
        build = head_class(head)
        # False leaves the head its own hyper-parameters: to the sampler that is a choice like any other.
        if not build.space or not trial.suggest_categorical("drawn", (False, True)):
            return Trial(head, rule, {})
        return Trial(head, rule, build.search_space(trial))


@dataclass(frozen=True)
class SpecSpace:
    """A policy spec whose parameters may have several values; `count` different trials of it."""

    base: str
    choices: Mapping[str, Sequence[str]]
    count: int

    @classmethod
    def parse(cls, spec: str, trials: int) -> SpecSpace:
        """Read a spec with ranges: `a..b` (numbers between) or `a|b|c` (one of them).

        Raises:
            InputError: a range that is none.
        """
        name, _, query = spec.partition("?")
        fixed, choices = [], {}
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not equals:
                raise InputError(f"--policy: expected key=value after the question mark, not {part!r}")
            if "|" in value:
                choices[key] = value.split("|")
            elif ".." in value:
                choices[key] = _between(key, value, trials)
            else:
                fixed.append(part)
        base = f"{name}?{'&'.join(fixed)}" if fixed else name
        return cls(base, choices, min(trials, math.prod(len(values) for values in choices.values())))

    def draw(self, trial: optuna.Trial) -> Trial:
        """Return the next trial."""
        return Trial(
            self.base, "", {key: trial.suggest_categorical(key, values) for key, values in self.choices.items()}
        )


def _between(key: str, text: str, count: int) -> list[str]:
    low, _, high = text.partition("..")
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise InputError(f"--policy: expected {key}=number..number or {key}=a|b|c, not {text!r}") from None
    if not math.isfinite(first) or not math.isfinite(last) or first >= last:
        raise InputError(f"--policy: expected {key}=low..high, low below high, not {text!r}")
    if all(part.lstrip("-").isdigit() for part in (low, high)):
        return [str(value) for value in range(int(low), int(high) + 1)]
    steps = max(2, count) - 1
    return [f"{first + (last - first) * at / steps:.4g}" for at in range(steps + 1)]


def spec_of(trial: Trial) -> str:
    """Return the spec of a trial of a policy."""
    if not trial.params:
        return trial.name
    joint = "&" if "?" in trial.name else "?"
    return trial.name + joint + "&".join(f"{key}={value}" for key, value in trial.params.items())
