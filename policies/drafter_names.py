"""The names in the spec of a drafter, such as `suffix:FILE?sure=0.6+hydra:PATH`: which there are, and where one ends.

`decode.drafters` makes drafters of specs; traces and profiles hold specs, which are compared without making any.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .plugins import NAME, Plugins

DRAFTERS = ("model", "lookup", "suffix", "medusa", "hydra", "ctc", "ctc-released", "layer")
"""Those that come with specstop; `decode.drafters.known` says what makes each."""

PLUGINS = Plugins("specstop.drafters", "drafter", "drafters", DRAFTERS)
"""Functions or classes that make a drafter of a pair; `needs_draft = True` on one says that it takes the draft model."""

_START = re.compile(rf"({NAME.pattern})(?:[:?+]|$)")


def known_names(text: str) -> set[str]:
    """Return the names of drafters that a spec may hold."""
    # Installed packages are looked at only where a plus sign may be one between two drafters.
    return {*DRAFTERS, *(PLUGINS.usable() if "+" in text else ())}


def split_first(text: str, known: Collection[str]) -> tuple[str, str | None]:
    """Return the first drafter of a spec and what follows it, None where it stands alone.

    Paths and values may hold plus signs of their own. So one counts after a bare name, or before a known one.
    """
    for sign in re.finditer(r"\+", text):
        own, rest = text[: sign.start()], text[sign.end() :]
        start = _START.match(rest)
        if NAME.fullmatch(own) or (start and start[1] in known):
            return own, rest
    return text, None


def kinds_of(text: str) -> str:
    """Return a spec without values and options, `suffix+hydra`; any text has one, whether or not it can be read."""
    own, rest = split_first(text, known_names(text))
    kind = re.split("[:?]", own, maxsplit=1)[0]
    return kind if rest is None else f"{kind}+{kinds_of(rest)}"
