"""Drafters of installed packages: how they are found, what they may take, and what one that does not load is told."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from commands import cli
from specstop.decode.drafters import FallbackDrafter, LookupDrafter, ModelDrafter, find_drafter, with_drafter
from specstop.decode.drafters.spec import DRAFTERS, needs_draft, parse_spec
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies import registry
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import FixedLength

PLUGIN = """
from specstop.decode.drafters import LookupDrafter, ModelDrafter

def copycat(pair, longest=2, share=1):
    if longest > 8:
        raise ValueError("too long")
    made = LookupDrafter(pair, longest)
    made.share = share
    return made

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


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Declares entry points: of a module that is there, by the names of what it holds."""
    (tmp_path / "drafting_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)

    def declare(**points: str) -> None:
        found = [EntryPoint(name, value, DRAFTERS.group) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == DRAFTERS.group else [])

    names = {"copycat": "copycat", "second": "Second", "unsure": "Unsure", "nothing": "nothing"}
    declare(**{name: f"drafting_plugin:{value}" for name, value in names.items()}, gone="no_such_module:X")
    yield declare
    sys.modules.pop("drafting_plugin", None)


PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


def test_they_are_named_as_policies_are(pair: Pair) -> None:
    made = find_drafter("copycat", pair)
    assert isinstance(made, LookupDrafter) and made._indexes[0].longest == 2
    made = find_drafter("copycat?longest=5&share=0.5", pair)
    assert (made._indexes[0].longest, made.share) == (5, 0.5)
    both = find_drafter("copycat?longest=5&confidence=0.7+model", pair)
    assert (
        isinstance(both, FallbackDrafter)
        and both._first._indexes[0].longest == 5
        and isinstance(both._other, ModelDrafter)
    )
    assert isinstance(find_drafter("suffix+copycat?longest=3", pair)._other, LookupDrafter)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("tree", "verification"), [("chain:3", "match"), ("2,2,1", "match"), ("2,2,1", "rejection"), ("chain:3", "block")]
)
def test_the_drafter_of_the_page_works(
    pair: Pair, installed: Callable[..., None], tmp_path: Path, tree: str, verification: str, temperature: float
) -> None:
    (code,) = re.findall(r"^`specstop_bigram.py`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "specstop_bigram.py").write_text(code)
    (entry,) = re.findall(r'^bigram = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    installed(bigram=entry)
    used = with_drafter(pair, "bigram?limit=2")
    settings = Settings(temperature, max_new_tokens=30, tree=tree, verification=verification)
    prompts = [[7, 8, 7, 8, 7], [9, 9, 9, 9], [3, 4]]
    speculator = Speculator(used, FixedLength(3), settings, batch=2)
    texts = speculator.run([Request(prompt, key) for key, prompt in enumerate(prompts)])
    assert any(record.accepted for text in texts for record in text.rounds)
    if temperature == 0.0 or verification == "match":
        plain = plain_texts(pair, prompts, range(3), 30, temperature).tokens
        assert [list(text.tokens) for text in texts] == plain
    sys.modules.pop("specstop_bigram")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("copycat?length=5", "got an unexpected keyword argument 'length'; it takes longest, share"),
        ("copycat?longest=9", "ValueError: too long"),
        ("copycat?longest", "expected key=value after the question mark"),
        ("copycat:5", "copycat, gone, nothing, second, unsure, or two"),
        ("copycats", "not 'copycats' (did you mean 'copycat'?)"),
        ("gone", "loading the plugin 'gone' (no_such_module:X) failed: ModuleNotFoundError"),
        ("nothing", "is a int, not a Drafter"),
        ("unsure", "unsure: expected for needs_draft False, True, not 'yes'"),
        (
            "second+model",
            "expected first one that reads neither hidden states nor a draft model, such as suffix, not second",
        ),
    ],
)
def test_what_cannot_be_used_is_told_why(pair: Pair, name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^drafter.*{re.escape(why)}"):
        find_drafter(name, pair)


def test_one_may_take_the_draft_model(pair: Pair) -> None:
    assert [needs_draft(name) for name in ("copycat", "second", "suffix+second", "suffix+copycat")] == [
        False,
        True,
        True,
        False,
    ]
    used = with_drafter(pair, "second")
    assert used.draft is pair.draft and isinstance(find_drafter("second", used), ModelDrafter)
    assert with_drafter(pair, "copycat").draft is None
    assert used.fingerprint["draft"] == f"second+{pair.fingerprint['draft']}"
    with pytest.raises(InputError, match="this needs a draft model"):
        find_drafter("second", dataclasses.replace(pair, draft=None))


def test_a_name_that_is_taken_is_told_and_harms_no_other(pair: Pair, installed: Callable[..., None]) -> None:
    installed(suffix="x:X", model="x:X", copycat="drafting_plugin:copycat")
    with pytest.raises(InputError, match=r"^drafter: two drafters are called 'suffix': x:X and a built-in; rename"):
        find_drafter("suffix", pair)
    assert isinstance(find_drafter("model", pair), ModelDrafter), "what every pair drafts by"
    assert isinstance(find_drafter("copycat", pair), LookupDrafter)


def test_damaged_metadata_leaves_those_that_come_with_specstop(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(registry, "entry_points", fail)
    with pytest.warns(SpecstopWarning, match="installed drafters cannot be listed: UnicodeDecodeError"):
        assert isinstance(find_drafter("lookup", pair), LookupDrafter)


def test_the_list_says_which_load() -> None:
    found = {one.name: one for one in DRAFTERS.listed()}
    assert {"model", "lookup", "suffix", "medusa", "hydra", "ctc", "layer"} < set(found)
    assert found["copycat"].what == "copycat?key=value; takes longest, share" and not found["copycat"].problem
    assert found["second"].what.endswith("; needs the draft model")
    assert found["gone"].problem.startswith("loading the plugin 'gone' (no_such_module:X) failed: ModuleNotFoundError")
    answer = cli("policies", "--drafters")
    assert answer.code == 0 and "copycat" in answer.out and "fixed" not in answer.out, answer.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("--target", "t", "--draft", "d", "--drafter", "lookup"),
            "--draft: the drafter lookup uses no draft model; leave",
        ),
        (("--target", "t", "--draft", "d", "--drafter", "lokup"), "--drafter: expected one of model, lookup"),
        (("--target", "t", "--drafter", "second"), "--draft: expected a draft model"),
        (("--target", "t", "--drafter", "gone"), "--drafter: loading the plugin 'gone'"),
    ],
)
def test_a_draft_is_given_where_it_is_used(words: tuple[str, ...], why: str) -> None:
    answer = cli("decode", "w7", *words)
    assert (answer.code, answer.out) == (2, "") and answer.err.startswith(f"specstop: {why}"), answer.err


def test_what_one_reads_is_told(installed: Callable[..., None]) -> None:
    def reading_of(spec: str) -> object:
        return parse_spec(spec)[-1].attribute("reading")

    assert [reading_of(name) for name in ("model", "copycat", "suffix+copycat", "suffix", "layer:x", "gone+lookup")] == [
        "path", "path", "path", "nothing", "all", "nothing",
    ]  # fmt: skip
    installed(odd="drafting_plugin:Odd", none="drafting_plugin:Reads")
    assert reading_of("none") == "nothing"
    with pytest.raises(InputError, match="expected for reading path, all, nothing, not 'much'"):
        reading_of("odd")
