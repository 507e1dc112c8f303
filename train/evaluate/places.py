"""Evaluate policies in several places (a trace and a profile each), and say where to deploy them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...collect.store import Trace
from ...policies.contract import StopPolicy
from ...policies.display import Progress, markdown, markdown_table, shown
from ...policies.errors import InputError
from ...policies.fixed import FixedLength
from ...policies.host import with_costs
from ...policies.learned import LearnedPolicy, other_conditions
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..replay.arrays import trace_arrays
from ..replay.checks import require_disjoint_policies
from ..replay.run import replay
from .comparison import Comparison
from .evaluate import label_policies
from .pricing import Priced, ProfileBootstrap, with_prices
from .records import Line
from .statistics import LogRatios, Resamples
from .verdict import verdict

COLUMNS = ("policy", "tokens/s", "vs best fixed", "verdict")


@dataclass(frozen=True)
class Place:
    """Policies on one trace with one profile.

    Attributes:
        name: of the place.
        prompts: number of prompts; `largest` is the share of all tokens in the longest one.
        best_fixed: the best fixed length.
        intervals: what the intervals include.
        lines: of the policies, in their order. `to_best_fixed` and `verdict` hold for all policies and places at once.
    """

    name: str
    prompts: int
    largest: float
    best_fixed: int
    intervals: str
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """Name, prompts and best fixed length in words."""
        return f"{self.name}: {self.prompts} prompts, best fixed length {self.best_fixed}, {self.intervals}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of `COLUMNS` for each policy."""
        return [(x.name, f"{x.tokens_per_s:.1f}", x.to_best_fixed.text(), x.verdict) for x in self.lines]


@dataclass(frozen=True)
class PlaceTable:
    """Policies by place."""

    places: tuple[Place, ...]

    def line(self, policy: str, place: str) -> Line:
        """Return a policy at a place."""
        return next(x for one in self.places for x in one.lines if (one.name, x.name) == (place, policy))

    def summary(self) -> Iterator[str]:
        """Yield where to deploy each policy, one sentence each."""
        for at, line in enumerate(self.places[0].lines):
            where: dict[str, list[str]] = {}
            for place in self.places:
                where.setdefault(place.lines[at].verdict, []).append(place.name)
            yield (
                f"{line.name}: " + "; ".join(f"{result} on {', '.join(names)}" for result, names in where.items()) + "."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON values."""
        return {"schema": 2, "kind": "places", **dataclasses.asdict(self), "summary": list(self.summary())}

    def to_markdown(self) -> str:
        """Return the summary and a table for each place as Markdown."""
        parts = ["# Where to deploy each policy", "\n".join(f"- {markdown(text)}" for text in self.summary())]
        for place in self.places:
            rows = [(*row, line.note) for row, line in zip(place.rows(), place.lines, strict=True)]
            parts += [
                f"## {markdown(place.name)}",
                f"{markdown(place.title)}:",
                markdown_table((*COLUMNS, "note"), rows),
            ]
        return "\n\n".join(parts)


def evaluate_places(
    policies: PolicySpec | Sequence[PolicySpec],
    places: Mapping[str, tuple[Trace, Profile]],
    *,
    allow_overlap: bool = False,
    seed: int = 0,
    progress: Progress = shown,
) -> PlaceTable:
    """Replay each policy in each place as it is: no threshold is tuned and no rate is solved.

    Args:
        policies: to compare.
        places: by name, a dense held-out trace with the profile of the machine.
        allow_overlap: warn about prompts that a policy was trained on instead of refusing them.
        seed: of the bootstrap. All places have the same one, so that samples of one set of prompts are resampled together.
        progress: see `Progress`.

    Raises:
        InputError: there is no policy or place, two policies have one name, or a place has a single prompt.
        TraceError: a policy does not fit a trace, or was trained on its prompts.
    """
    policies = label_policies(as_policies(policies))
    if not policies or not places:
        raise InputError("expected at least one --policy and one --traces")
    results: list[tuple[Place, LogRatios, Resamples]] = []
    for done, (name, (trace, profile)) in enumerate(places.items()):
        progress("places", done, len(places))
        results.append(_evaluate_place(name, trace, profile, policies, allow_overlap, seed))
    progress("places", len(places), len(places))
    ratios, judged = results[0][2].simultaneous([logs for _, logs, _ in results]), []
    for (place, *_), of_place in zip(results, ratios, strict=True):
        lines = []
        for line, ratio in zip(place.lines, of_place, strict=True):
            result = verdict(ratio, place.prompts, line.parts, place.largest)
            lines.append(dataclasses.replace(line, to_best_fixed=ratio, to_rival=ratio, verdict=result))
        judged.append(dataclasses.replace(place, lines=tuple(lines)))
    return PlaceTable(tuple(judged))


def _evaluate_place(
    name: str, trace: Trace, profile: Profile, policies: Sequence[StopPolicy], allow_overlap: bool, seed: int
) -> tuple[Place, LogRatios, Resamples]:
    """Return a place whose intervals hold for its policies only, and what simultaneous intervals are computed from."""
    arrays, profile = trace_arrays(trace), with_prices(profile, policies, trace.header)[0]
    require_disjoint_policies("--traces", arrays, policies, allow=allow_overlap)
    costs, boot = ProfileBootstrap(profile, seed), Resamples(arrays.clusters, seed)
    depth = min(arrays.depth, profile.max_depth)
    if boot.clusters < 2:
        raise InputError(f"{name}: expected two prompts or more, got {boot.clusters}")
    limited = [with_costs(policy, profile).limited(depth) for policy in policies]
    replayed = [replay(arrays, policy, profile) for policy in (*map(FixedLength, range(depth + 1)), *limited)]
    priced = Priced(boot, costs, replayed, arrays.prompt_tokens)
    tokens, by_prompt = arrays.text_tokens.double().numpy(), boot.by_cluster(arrays.text_tokens)
    largest = float(by_prompt.max() / by_prompt.sum())
    kinds = {policy.shown_name: "learned" if isinstance(policy, LearnedPolicy) else "rule" for policy in policies}
    compared = Comparison(boot, costs, tokens, priced, kinds, largest=largest)
    lines = tuple(
        compared.line(name, kind, compared.rate(name), note=_training_note(policy, trace))
        for policy, (name, kind) in zip(policies, kinds.items(), strict=True)
    )
    columns = range(depth + 1, depth + 1 + len(policies))
    logs = boot.log_ratios(tokens, priced.by_text(), columns, range(depth + 1), -np.log(priced.factors()))
    best = int(np.argmax(compared.fixed))
    return Place(name, boot.clusters, largest, best, costs.describe(), lines), logs, boot


def _training_note(policy: StopPolicy, trace: Trace) -> str:
    """Return what a learned policy was trained on, and which conditions of the trace are different."""
    if not isinstance(policy, LearnedPolicy):
        return ""
    source = "/".join(Path(str(policy.metadata.provenance.get("traces", ""))).parts[-2:]) or "unknown traces"
    differ = [name for name, *_ in other_conditions(policy, trace.header.conditions)]
    return f"trained on {source}" + (f", for another {', '.join(differ)}" if differ else "")
