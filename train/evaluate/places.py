"""Evaluate policies in several places (a trace and a profile each), and say where to deploy them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...collect.store.folder import Trace
from ...policies.contract import StopPolicy
from ...policies.display import Progress, markdown, markdown_table, shown
from ...policies.errors import InputError
from ...policies.fixed import FixedLength
from ...policies.host import with_costs
from ...policies.learned import LearnedPolicy, other_conditions
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..replay.log import play
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..replay.traces.checking import require_disjoint_policies
from ..report.checks import require_different_names
from ..report.decision_costs import with_prices
from ..report.pricing import Draws, Priced
from ..report.records import Line, verdict
from ..report.speeds import Comparison
from ..statistics import LogRatios, Resamples

COLUMNS = ("policy", "tokens/s", "vs best fixed", "verdict")


@dataclass(frozen=True)
class Place:
    """Policies on one trace with one profile.

    Attributes:
        name: folder of the trace, and the profile if there are several.
        prompts: number of prompts.
        best_fixed: the best fixed length.
        lines: of the policies, in their order. `to_best_fixed` and `verdict` hold for all policies and places at once.
    """

    name: str
    prompts: int
    best_fixed: int
    lines: tuple[Line, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of `COLUMNS` for each policy."""
        return [(x.name, f"{x.tokens_per_s:.1f}", x.to_best_fixed.text(), x.verdict) for x in self.lines]

    def title(self) -> str:
        """Return name, prompts and best fixed length in words."""
        return f"{self.name}: {self.prompts} prompts, best fixed length {self.best_fixed}"


@dataclass(frozen=True)
class PlaceTable:
    """Policies by place.

    Attributes:
        places: every trace with every profile.
        intervals: what the intervals include.
    """

    places: tuple[Place, ...]
    intervals: str

    def line(self, policy: str, place: str) -> Line:
        """Return a policy at a place."""
        return next(x for one in self.places for x in one.lines if (one.name, x.name) == (place, policy))

    def summary(self) -> Iterator[str]:
        """Yield where to deploy each policy, one sentence each."""
        for at, line in enumerate(self.places[0].lines):
            where: dict[str, list[str]] = {}
            for place in self.places:
                where.setdefault(place.lines[at].verdict, []).append(place.name)
            yield f"{line.name}: " + "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in where.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        return {"schema": 2, "kind": "places", **dataclasses.asdict(self), "summary": list(self.summary())}

    def to_markdown(self) -> str:
        """Return the tables and the summary as Markdown."""
        parts = ["# Where to deploy each policy", "\n".join(f"- {markdown(text)}" for text in self.summary())]
        for place in self.places:
            rows = [(*row, line.note) for row, line in zip(place.rows(), place.lines, strict=True)]
            parts += [f"## {markdown(place.title())}", markdown_table((*COLUMNS, "note"), rows)]
        return "\n\n".join([*parts, f"{self.intervals}."]) + "\n"


def evaluate_places(
    policies: PolicySpec | Sequence[PolicySpec],
    places: Sequence[tuple[Trace, Profile]],
    *,
    allow_overlap: bool = False,
    seed: int = 0,
    progress: Progress = shown,
) -> PlaceTable:
    """Replay each policy in each place as it is: no threshold is tuned and no rate is solved.

    Args:
        policies: to compare.
        places: dense held-out traces, each with the profile of the machine.
        allow_overlap: warn about prompts that a policy was trained on instead of refusing them.
        seed: of the bootstrap. All places have the same one, so that samples of one set of prompts are resampled together.
        progress: see `Progress`.

    Raises:
        InputError: there is no policy or place, or two have the same name.
        TraceError: a policy does not fit a trace, or was trained on its prompts.
    """
    policies = as_policies(policies)
    if not policies or not places:
        raise InputError("expected at least one --policy and one --traces")
    require_different_names([policy.shown_name for policy in policies])
    names, results = _place_names(places), []
    for done, (name, (trace, profile)) in enumerate(zip(names, places, strict=True)):
        progress("places", done, len(places))
        arrays = trace_arrays(trace)
        require_disjoint_policies("--traces", arrays, policies, allow=allow_overlap)
        results.append(_evaluate_place(name, trace, arrays, profile, policies, seed))
    progress("places", len(places), len(places))
    return PlaceTable(tuple(_judge_together(results)), results[0].intervals)


@dataclass(frozen=True)
class _Result:
    """A place with intervals that do not cover the others yet, and what simultaneous intervals are computed from."""

    place: Place
    logs: LogRatios
    boot: Resamples
    largest: float
    intervals: str


def _evaluate_place(
    name: str, trace: Trace, arrays: TraceArrays, profile: Profile, policies: Sequence[StopPolicy], seed: int
) -> _Result:
    profile, _ = with_prices(profile, policies, trace.header)
    draws, boot, depth = Draws(profile, seed), Resamples(arrays.clusters, seed), min(arrays.depth, profile.max_depth)
    limited = [with_costs(policy, profile).limited(depth) for policy in policies]
    replayed = [play(arrays, policy, profile) for policy in (*map(FixedLength, range(depth + 1)), *limited)]
    priced = Priced(boot, draws, [one.rounds for one in replayed], arrays.prompt_tokens)
    tokens, by_cluster = arrays.text_tokens.double().numpy(), boot.by_cluster(arrays.text_tokens)
    largest = float(by_cluster.max() / by_cluster.sum()) if boot.clusters > 1 else 0.0
    kinds = {p.shown_name: "learned" if isinstance(p, LearnedPolicy) else "rule" for p in policies}
    compared = Comparison(boot, draws, tokens, priced, kinds, depth + 1, largest=largest)
    lines = tuple(
        compared.line(policy.shown_name, kinds[policy.shown_name], compared.speeds.of[policy.shown_name], None, note)
        for policy, note in ((policy, _training_note(policy, trace)) for policy in policies)
    )
    columns, lengths = range(depth + 1, depth + 1 + len(policies)), range(depth + 1)
    logs = boot.log_ratios(tokens, priced.by_text(), columns, lengths, -np.log(priced.factors()))
    place = Place(name, boot.clusters, int(np.argmax(compared.speeds.fixed)), lines)
    return _Result(place, logs, boot, largest, draws.text)


def _judge_together(results: Sequence[_Result]) -> Iterator[Place]:
    """Yield the places with intervals that hold for all policies and places at once, and verdicts by these intervals."""
    with_interval = [one for one in results if one.boot.clusters > 1]
    ratios: dict[str, list[Any]] = {one.place.name: one.boot.simultaneous([one.logs])[0] for one in results}
    if with_interval:
        together = with_interval[0].boot.simultaneous([one.logs for one in with_interval])
        ratios |= {one.place.name: each for one, each in zip(with_interval, together, strict=True)}
    for one in results:
        lines = []
        for line, ratio in zip(one.place.lines, ratios[one.place.name], strict=True):
            result = verdict(ratio, one.boot.clusters, line.parts, one.largest)
            lines.append(dataclasses.replace(line, to_best_fixed=ratio, to_rival=ratio, verdict=result))
        yield dataclasses.replace(one.place, lines=tuple(lines))


def _place_names(places: Sequence[tuple[Trace, Profile]]) -> list[str]:
    """Return a different name for each place: the folder of the trace, and the file of the profile if there are several."""
    profiles = list({id(profile): profile for _, profile in places}.values())
    files = [profile.source for profile in profiles if profile.source is not None]
    if len(set(files)) < len(profiles):  # not all are from files, or one was changed after it was read
        files = [Path(f"profile {number}") for number in range(1, len(profiles) + 1)]
    traces, labels = _short_names([trace.folder for trace, _ in places]), _short_names(files)
    of_profile = {
        id(profile): f", {name}" if len(labels) > 1 else "" for profile, name in zip(profiles, labels, strict=True)
    }
    names = [name + of_profile[id(profile)] for name, (_, profile) in zip(traces, places, strict=True)]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"expected each trace with each profile once, got {again!r} twice")
    return names


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many as distinguish different paths."""
    parts = [path.resolve().parts for path in paths]
    size = next(n for n in range(1, max(map(len, parts)) + 1) if len({p[-n:] for p in parts}) == len(set(parts)))
    return ["/".join(p[-size:]) for p in parts]


def _training_note(policy: StopPolicy, trace: Trace) -> str:
    """Return what a learned policy was trained on, and which conditions of the trace are different."""
    if not isinstance(policy, LearnedPolicy):
        return ""
    source = "/".join(Path(str(policy.metadata.provenance.get("traces", ""))).parts[-2:]) or "unknown traces"
    differ = [name for name, *_ in other_conditions(policy, trace.header.conditions)]
    return f"trained on {source}" + (f", for another {', '.join(differ)}" if differ else "")
