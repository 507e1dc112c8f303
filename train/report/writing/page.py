"""The report as one page of HTML: nothing is fetched, no script runs, and every text is escaped.

The page is made from the report's JSON form alone. Each figure is a `data` element that carries the figure as the JSON has it
and its place there, so that page and JSON can be compared.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from ....policies.display import printable
from ....policies.learned import sampling_text
from ..drawing.pictures import DRAWN
from .model import Data, Num, Path
from .sections import sections

if TYPE_CHECKING:
    from jinja2 import Template

_INLINE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


def to_html(data: Data) -> str:
    """Return the page.

    Args:
        data: `Report.to_dict()` as JSON values.
    """
    parts = sections(data)
    found = data["answer"]
    page = _template().render(
        data=data,
        answer=found,
        title=_title(found),
        figures=_figures(data) if found else [],
        facts=facts_text(data),
        sections=parts,
        pictures={part.id: DRAWN[part.id](data) for part in parts if part.id in DRAWN},
        style=_asset("page.css"),
    )
    return printable(page)


def _title(found: dict[str, Any] | None) -> str:
    """Return what the page is called, by its answer."""
    if found is None:
        return "what each policy gains"
    return str(found["use"] if found["deploy"] else f"use {found['use']}")


def _figures(data: Data) -> list[dict[str, Any]]:
    """Return the figures at the top: label, number, interval."""
    found = data["answer"]
    names = [line["name"] for line in data["lines"]]
    candidate = names.index(found["candidate"])
    static = found["use"] if found["use"] in names and not found["deploy"] else "best fixed"
    use = candidate if found["deploy"] else names.index(static)
    use_path, path = (("lines", use, "to_plain"), ("lines", candidate, "to_best_fixed"))
    out = [
        _with_interval(f"{found['use']}: times plain decoding", use_path, ".2f"),
        _with_interval(f"{found['candidate']}: times the best fixed length", path, ".3f"),
    ]
    if any(line["kind"] == "bound" for line in data["lines"]):
        out.append(_with_interval("share of the oracle gain", ("lines", candidate, "oracle_share"), ".2f"))
    return out


def _with_interval(label: str, path: Path, form: str) -> dict[str, Any]:
    value, low, high = (Num((*path, part), form) for part in ("value", "low", "high"))
    return {"label": label, "num": value, "low": low, "high": high, "unit": ""}


def facts_text(data: Data) -> str:
    """Return what the report is about, in one sentence."""
    facts = data["facts"]
    device = facts["profile"].get("device", "unknown device")
    sampled = sampling_text(facts["temperature"], facts.get("shaping", {}))
    rounds = f" {facts['rounds']:,} single rounds," if "rounds" in facts else ""
    exact = f"replay {facts['exactness']}; " if facts.get("exactness", "").startswith(("exact", "nearly")) else ""
    chosen = facts.get("cluster choice", "")
    clusters = f"; {chosen}" if chosen else ""
    return (
        f"{facts['prompts']:,} held-out prompts, {facts['tokens']:,} tokens,{rounds} {sampled}, "
        f"{facts['mode'].replace(' (', ' verification (', 1)}, candidates {shape_text(facts)}; "
        f"{exact}{facts['intervals']}{clusters}; latency profile: {device}."
    )


def shape_text(facts: dict[str, Any]) -> str:
    """Return a chain or a tree in words."""
    shape = str(facts.get("topology", ""))
    if not shape.replace("1", "").replace(",", ""):
        return f"in a chain of up to {facts['depth']}"
    words = shape if len(shape) < 40 else f"depth {facts['depth']}"
    return f"in a tree ({words})"


def _num(where: Path, *path: str | int, form: str = ".3f") -> Num:
    return Num((*where, *path), form)


def _context(tokens: Sequence[str]) -> str:
    """Return the text of tokens, ends of lines visible and blank lines on one."""
    marked = re.sub(r"\n(?:[ \t]*\n)*", lambda found: "⏎" * found[0].count("\n") + "\n", "".join(tokens))
    return marked.replace("\t", "⇥").replace("\r", "␍")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    # An ElementTree wrote the drawing and escaped it; the style sheet is ours.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    environment.filters["drawing"] = Markup
    environment.filters["inline"] = lambda text: text.translate(_INLINE)
    environment.filters["context"] = _context
    environment.globals["num"] = _num
    return environment.from_string(_asset("page.html"))
