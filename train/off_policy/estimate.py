"""`estimate_offline`: what another policy's rounds would be worth, from a live trace of a censored one with exploration.

Where the text does not depend on the policy (`match`), dense traces say exactly what any policy would gain, and `evaluate` is
the answer. Rejection and block verification, and whoever has only a log of what runs, need estimates: of single rounds where
the recorded run had them, not of whole texts, because a round that stops elsewhere is followed by other rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...collect.store.folder import Trace
from ...decode.benchmark import Ratio
from ...policies.contract import StopPolicy
from ...policies.errors import PolicyError, TraceError
from ...policies.host import with_costs
from ...policies.learned import warn_other_conditions
from ...policies.profile import Profile
from ...policies.registry import BUILTINS, PolicySpec, as_policy, load_policy
from ..evaluate.decision_costs import with_prices
from ..evaluate.statistics import LEVEL, REPLICATES, Resamples, Values
from ..replay.rounds import CAVEATS
from ..replay.traces.arrays import TraceArrays, trace_arrays
from .estimators import ESTIMATORS
from .feedback import Feedback, logged_feedback
from .rounds import COLUMNS, Shown, shown_rounds

MOST_MISSED = 0.002
"""Share of rounds that a replayed logging policy may stop elsewhere than recorded: ties of single precision."""

FEW = 30
"""Rounds seen by exploration alone below which a reader is warned."""

_UNKNOWN = (
    "the logging policy cannot be asked again, so that explored rounds alone serve (give it with --logging-policy)"
)
_FEW = "only {} rounds are seen by exploration alone; intervals of so few are rough"
_DIRECT = "the direct method is as good as its regression; its interval is the doubly robust one's about its own value"


@dataclass(frozen=True)
class OfflineLine:
    """One estimator.

    Attributes:
        name: as Open Bandit Pipeline has it.
        tokens, seconds: of a round.
        rate: tokens per second, their ratio.
        net: tokens - rho seconds, what a round brings beyond what its time is worth at rate rho.
        to_logging: `rate` over that of the logging policy's own rounds.
    """

    name: str
    tokens: Ratio
    seconds: Ratio
    rate: Ratio
    net: Ratio
    to_logging: Ratio


@dataclass(frozen=True)
class Offline:
    """The answer of `estimate_offline`.

    Attributes:
        policy, logging: names.
        rounds, prompts: of the trace.
        explore: share of rounds drafted to full depth.
        shown: share of rounds that show what the policy would have brought.
        by_exploration: number of those that show it only because they explored.
        effective_rounds: (sum w)^2 / sum w^2 of the importance weights.
        rho: tokens per second that `net` prices time with.
        lines: one an estimator.
        caveats: what a reader must know; always to be printed.
        facts: profile, intervals.
    """

    policy: str
    logging: str
    rounds: int
    prompts: int
    explore: float
    shown: float
    by_exploration: int
    effective_rounds: float
    rho: float
    lines: tuple[OfflineLine, ...]
    caveats: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str) -> OfflineLine:
        """Return the line of an estimator."""
        return next(line for line in self.lines if line.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates as plain JSON values."""
        return {"schema": 1, "kind": "offline", **dataclasses.asdict(self)}


def estimate_offline(
    traces: Trace,
    policy: PolicySpec,
    profile: Profile,
    *,
    logging: PolicySpec | None = None,
    rho: float | None = None,
    seed: int = 0,
) -> Offline:
    """Estimate what a round of `policy` is worth from a live trace of another policy; see `rounds` for what is assumed.

    Args:
        traces: of `collect --collector live --explore`.
        policy: to be evaluated, cut to the depth of the trace.
        profile: what rounds cost.
        logging: the policy that was recorded; by default the one that the header names, if it is a built-in one.
        rho: tokens per second; by default the rate of the logging policy's own rounds.
        seed: of the bootstrap, and of the regression's folds.

    Raises:
        TraceError: nothing explored, so that what the policy needs is never seen; `logging` stops elsewhere than the rounds
            recorded; or one of `rounds.check_logged`.
    """
    header = traces.header
    policy, logging = as_policy(policy), None if logging is None else as_policy(logging)
    warn_other_conditions(policy, header.conditions, "these traces")
    arrays = trace_arrays(traces, extra=COLUMNS if header.collector == "live" else ())
    asked = logging is not None
    logging = logging or _named(header.policy)
    policy = with_costs(policy, profile)
    if logging is not None and "profile" in header.facts and _hears(logging, profile):
        if asked:
            raise TraceError(
                f"--logging-policy: {logging.name} went by the costs of the profile that the traces were collected with, "
                "which they do not hold; leave it out"
            )
        logging = None
    depth = min(arrays.depth, profile.max_depth)
    known = [policy] if logging is None else [policy, logging]
    profile, _ = with_prices(profile, known, header)
    shown = shown_rounds(arrays, policy.limited(depth), profile)
    # As deep as it was recorded, or it would seem to stop elsewhere.
    base = None if logging is None else shown_rounds(arrays, logging.limited(arrays.depth), profile, recorded=True)
    if base is not None and (missed := _missed(arrays, base)) > MOST_MISSED:
        if asked:
            raise TraceError(
                f"--logging-policy: {logging.name if logging else ''} stops elsewhere than {missed:.1%} of the rounds "
                f"recorded, which were under {header.policy or 'another policy'}; give that one, or none"
            )
        base = None
    feedback = logged_feedback(arrays, shown, base, profile, seed)
    if feedback.by_coin.any() and not feedback.by_exploration.any():
        raise TraceError(
            f"{feedback.by_coin.mean():.0%} of the rounds would show what {policy.name} does only if they explored, and none "
            f"of those did (--explore {header.explore:g}); collect live traces with a larger --explore"
        )
    prompt = [name for name, rounds in zip(arrays.clusters, arrays.rows.tolist(), strict=True) for _ in range(rounds)]
    return _answer(arrays, policy, feedback, prompt, rho, profile, seed)


def _named(name: str) -> StopPolicy | None:
    """Return the built-in policy that a header names, or None: no folder, hub or plugin is opened because a trace says so."""
    if name.partition(":")[0] not in BUILTINS or "?" in name:
        return None
    try:
        made = load_policy(name)
    except PolicyError:
        return None
    # A name ends in its value, such as `fixed:4`; what is built must have that very name, or it is another policy.
    return made if made.name == name else None


def _hears(policy: StopPolicy, profile: Profile) -> bool:
    """Whether what a policy does may depend on a profile: it hears what rounds take, or decides by costs."""
    hears = type(policy).observe is not StopPolicy.observe and policy.reads_seconds
    return hears or with_costs(policy, profile) is not policy


def _missed(arrays: TraceArrays, base: Shown) -> float:
    """Return the share of unexplored rounds in which the logging policy would have gone elsewhere than it did."""
    assert arrays.drawn is not None
    # Explored rounds were overruled, so that only the others show where the policy stops by itself.
    alone = ~arrays.extra["explored"].numpy()
    drawn, sent = arrays.drawn.sum(1).numpy(), arrays.extra["sent"].bool().sum(1).numpy()
    same = base.seen & (base.drafted == drawn) & (base.verified == sent)
    return float((~same[alone]).mean()) if alone.any() else 0.0


def _resampled(estimator: str, feedback: Feedback, made: Resamples) -> list[Values]:
    """Return [1 + R] tokens and [1 + R] seconds of a round, in the sample and in every resample."""
    out = []
    for reward in feedback.rewards:
        above, below = feedback.terms(estimator, reward)
        with np.errstate(invalid="ignore", divide="ignore"):
            out.append(made.total(above) / made.total(below))  # NaN where a resample sees nothing
    return out


def _answer(
    arrays: TraceArrays,
    policy: StopPolicy,
    feedback: Feedback,
    prompt: Sequence[Any],
    rho: float | None,
    profile: Profile,
    seed: int,
) -> Offline:
    made = Resamples(prompt, seed)
    own = {name: made.total(values) for name, values in feedback.own.items()}
    base_rate = own["tokens"] / own["seconds"]
    rho = float(base_rate[0]) if rho is None else rho
    values = {name: _resampled(name, feedback, made) for name in ESTIMATORS}
    # A regression's interval that takes the regression as given is far too narrow. Fitted by least squares with an intercept
    # where the coin alone says what is seen, the direct method has the doubly robust one's influence function.
    values["dm"] = [mine[0] + dr - dr[0] for mine, dr in zip(values["dm"], values["dr"], strict=True)]
    lines = []
    for name, (tokens, seconds) in values.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = tokens / seconds
            shown = (tokens, seconds, rate, tokens - rho * seconds, rate / base_rate)
        lines.append(OfflineLine(name, *(made.interval(v) for v in shown)))
    few, weight = int(feedback.by_exploration.sum()), feedback.weight
    notes = [_UNKNOWN] if feedback.is_explored_only else []
    notes += [_FEW.format(few)] if 0 < few < FEW else []
    return Offline(
        policy.name,
        arrays.header.policy,
        len(weight),
        made.clusters,
        arrays.header.explore,
        float(feedback.seen.mean()),
        few,
        float(weight.sum() ** 2 / (weight**2).sum()),  # Kish's effective sample size
        rho,
        tuple(lines),
        (*CAVEATS, *notes, _DIRECT),
        {
            "traces_temperature": arrays.header.temperature,
            "verification": arrays.header.verification,
            "profile": dict(profile.facts),
            "intervals": f"{LEVEL:.0%} bootstrap over prompts, {REPLICATES} replicates",
        },
    )
