"""Drafters of installed packages: discovery, calls, and errors of drafters that do not load."""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from commands import cli
from specstop.decode.drafters import LookupDrafter, ModelDrafter, find_drafter, with_drafter
from specstop.decode.drafters.spec import DRAFTERS, needs_draft, parse_spec
from specstop.decode.loop import Request, Speculator
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies import registry
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

PLUGIN = """
from specstop.decode.drafters import LookupDrafter, ModelDrafter

def copycat(pair, longest=2, share=1):
    if longest > 8:
        raise ValueError("too long")
    drafter = LookupDrafter(pair, longest)
    drafter.share = share
    return drafter

class Second(ModelDrafter):
    needs_draft = True

class Unsure(ModelDrafter):
    needs_draft = "yes"

class Reads(LookupDrafter):
    pass

class Odd(LookupDrafter):
    reading = "much"

def nothing(pair):
    return 5
"""
PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"


@pytest.fixture(autouse=True)
def declare(tmp_path, monkeypatch):
    """Declare entry points by name."""
    (tmp_path / "drafting_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)

    def declare(**points: str) -> None:
        entry_points = [EntryPoint(name, value, DRAFTERS.group) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: entry_points if group == DRAFTERS.group else [])

    names = {"copycat": "copycat", "second": "Second", "unsure": "Unsure", "nothing": "nothing", "odd": "Odd"}
    declare(**{name: f"drafting_plugin:{value}" for name, value in names.items()}, missing="no_such_module:X")
    yield declare
    for module in ("drafting_plugin", "specstop_bigram"):
        sys.modules.pop(module, None)


@pytest.fixture(scope="session")
def pair(plain_pair):
    return plain_pair


@pytest.mark.parametrize(
    ("tree", "verification", "temperature"),
    [("2,2,1", "match", 0.7), ("2,2,1", "rejection", 0.7)],
)
def test_the_drafter_of_the_documentation_works(pair, declare, tmp_path, tree, verification, temperature):
    (code,) = re.findall(r"^`specstop_bigram.py`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "specstop_bigram.py").write_text(code)
    (entry,) = re.findall(r'^bigram = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    declare(bigram=entry)
    settings = Settings(temperature, max_new_tokens=30, tree=tree, verification=verification)
    prompts = [[7, 8, 7, 8, 7], [9, 9, 9, 9], [3, 4]]
    speculator = Speculator(with_drafter(pair, "bigram?limit=2"), FixedLength(3), settings, batch=2)
    texts = speculator.run([Request(prompt, key) for key, prompt in enumerate(prompts)])
    assert any(record.accepted for text in texts for record in text.rounds)
    if temperature == 0.0 or verification == "match":
        assert [list(text.tokens) for text in texts] == plain_texts(pair, prompts, range(3), 30, temperature).tokens


@pytest.mark.parametrize(
    ("spec", "noun"),
    [
        ("copycat?length=5", "length"), ("copycat?longest=9", "too long"), ("copycat?longest", "key=value"),
        ("copycat:5", "copycat"), ("copycats", "did you mean 'copycat'"), ("missing", "no_such_module"), ("nothing", "int"),
        ("unsure", "needs_draft"), ("second+model", "draft model"),
    ],
)  # fmt: skip
def test_a_drafter_that_cannot_be_used_is_refused_with_the_reason(pair, spec, noun):
    with pytest.raises(InputError, match=f"^drafter.*{noun}"):
        find_drafter(spec, pair)


def test_a_drafter_may_use_the_draft_model(pair):
    drafter: Any = find_drafter("suffix+copycat?longest=5&share=0.5", pair)._other
    assert (drafter._indexes[0].longest, drafter.share) == (5, 0.5)
    for name, expected in (("copycat", False), ("second", True), ("suffix+second", True), ("suffix+copycat", False)):
        assert needs_draft(name) == expected == (with_drafter(pair, name).draft is not None)
    assert with_drafter(pair, "second").fingerprint["draft"] == f"second+{pair.fingerprint['draft']}"
    with pytest.raises(InputError, match="needs a draft model"):
        find_drafter("second", dataclasses.replace(pair, draft=None))


def test_a_duplicate_name_affects_no_other(pair, declare):
    declare(suffix="x:X", model="x:X", copycat="drafting_plugin:copycat")
    with pytest.raises(InputError, match=r"two drafters .*suffix"):
        find_drafter("suffix", pair)
    assert isinstance(find_drafter("model", pair), ModelDrafter), "the default of every pair"
    assert isinstance(find_drafter("copycat", pair), LookupDrafter)


def test_the_list_of_drafters_and_what_they_read():
    listed = {one.name: one for one in DRAFTERS.listed()}
    assert {"model", "lookup", "suffix", "medusa", "hydra", "ctc", "layer"} < set(listed)
    assert "longest, share" in listed["copycat"].what and not listed["copycat"].problem
    assert "no_such_module" in listed["missing"].problem
    answer = cli("policies", "--drafters")
    assert answer.code == 0 and "copycat" in answer.out and "fixed" not in answer.out, answer.err
    expected = {"model": "path", "copycat": "path", "suffix+copycat": "path", "suffix": "nothing", "layer:x": "all"}
    assert {spec: parse_spec(spec)[-1].attribute("reading") for spec in expected} == expected
    with pytest.raises(InputError, match="reading"):
        parse_spec("odd")[-1].attribute("reading")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--target t --draft d --drafter lookup", "--draft"), ("--target t --draft d --drafter lokup", "--drafter"),
        ("--target t --drafter second", "--draft"), ("--target t --drafter missing", "--drafter"),
    ],
)  # fmt: skip
def test_the_command_line_requires_a_draft_where_it_is_used(words, option):
    answer = cli("decode", "w7", *words.split())
    assert (answer.code, answer.out) == (2, "") and answer.err.startswith(f"specstop: {option}: "), answer.err
