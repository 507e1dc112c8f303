"""What a policy that is to run inside a serving engine can be trained on (`train --for`)."""

from __future__ import annotations

from collections.abc import Sequence

from ...collect.store import Trace
from ...decode.engines.settings import known_in_engines
from ...policies.errors import InputError, TraceError, close_match
from ...policies.features import feature
from .head_specs import head_spec, usual_features

HOSTS = ("vllm",)

INSTEAD = ("margin", "entropy")
"""Read in the place of a noisy margin, which tells how sure the draft is."""


def check_host(host: str, traces: Sequence[Trace], rule: str | None, hidden: Sequence[str]) -> None:
    """Refuse what no policy of an engine can be trained on.

    Args:
        host: of `HOSTS`.
        traces: that it is to be fitted on.
        rule: that is asked for.
        hidden: hidden states that are asked for, or that the head must read.

    Raises:
        InputError: there is no such host, or it has no hidden states or no trees.
        TraceError: the labels are not what acceptance is there.
    """
    if host not in HOSTS:
        raise InputError(f"--for: expected {', '.join(HOSTS)}, not {host!r}{close_match(host, HOSTS)}")
    if rule == "gain":
        raise InputError(f"--for {host}: expected a rule for chains, not gain: no trees are drafted there")
    if hidden:
        raise InputError(f"--for {host}: {', '.join(hidden)} cannot be read there; choose a head of scalar features")
    for trace in traces:
        header = trace.header
        if header.temperature > 0 and header.label != "point":
            raise TraceError(
                f"--for {host}: {trace.folder} has labels {header.label!r} at temperature {header.temperature:g}; "
                f"{host} verifies the draft's likeliest token, accepted with the target's probability of it: "
                "expected labels of the kind 'point' (`specstop collect --verification point`), or temperature 0"
            )


def features_for(
    host: str, traces: Sequence[Trace], head: str, asked: Sequence[str] | None, usual: Sequence[str]
) -> tuple[str, ...]:
    """Return the features that a head reads in an engine.

    Args:
        host: of `HOSTS`.
        traces: that it is to be fitted on.
        head: its kind.
        asked: features that were asked for; None = the usual ones, as far as the engine knows them.
        usual: what heads read unless told otherwise.

    Raises:
        InputError: the engine does not know a feature that was asked for, or that the head must read.
    """
    greedy = all(trace.header.temperature == 0.0 for trace in traces)
    names = tuple(asked) if asked else usual_features(head, usual)
    unknown = [name for name in names if not known_in_engines(feature(name).name, greedy)]
    if unknown and (asked or head_spec(head).features is not None):
        raise InputError(
            f"--for {host}: {', '.join(unknown)} cannot be read there; known are the draft's own rows, tokens and earlier "
            "rounds"
        )
    known = [name for name in names if name not in unknown]
    return tuple(dict.fromkeys([*known, *INSTEAD])) if unknown else names
