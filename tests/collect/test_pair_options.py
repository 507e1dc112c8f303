"""How a command line names the pair of a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from random_trace import HEADER
from specstop.collect.schema import draft_of, pair_options


@pytest.mark.parametrize(
    ("draft", "facts", "words"),
    [
        ("d", {}, "--target t --draft d"),
        # With another drafter the header's `draft` is its spec.
        ("hydra:h", {"drafter": "hydra:h", "draft model": ""}, "--target t --drafter hydra:h"),
        (
            "suffix+model",
            {"drafter": "suffix+model", "draft model": "d"},
            "--target t --draft d --drafter suffix+model",
        ),
        ("", {}, "--target t --draft DRAFT"),
        ("d", {"device": "cpu", "dtype": "float32"}, "--target t --draft d"),
        (
            "d",
            {"device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"},
            "--target t --draft d --device cuda --dtype bfloat16",
        ),
    ],
)
def test_the_pair_is_named_as_commands_take_it(draft: str, facts: dict[str, Any], words: str) -> None:
    header = replace(HEADER, target="t", draft=draft, facts=facts)
    assert " ".join(pair_options(header)) == words
    assert pair_options(replace(header, target=""))[:2] == ["--target", "TARGET"]
    assert draft_of(header) in ("d", "DRAFT")
