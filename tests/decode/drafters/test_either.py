"""Two drafters at once: which drafts when, and that each goes on as if it were alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import NEW
from small_drafters import new_round, proposed, small_drafter
from specstop.decode.drafters import (
    FallbackDrafter,
    LookupDrafter,
    ModelDrafter,
    SuffixDrafter,
    find_drafter,
    with_drafter,
)
from specstop.decode.drafters.spec import needs_draft, paths_of
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

REPEATS, NEW_TEXT = [5, 8, 30, 31, 5, 8], [5, 8, 30, 31, 6, 7]


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@torch.inference_mode()
def test_the_first_drafts_where_it_is_sure_and_the_other_elsewhere(pair: Pair) -> None:
    """Alone and in a batch, in which the rows of both stand in the order of the streams."""

    def rows(drafter: FallbackDrafter | SuffixDrafter | ModelDrafter, texts: list[list[int]]) -> list[torch.Tensor]:
        drafter.reserve(len(texts), 40)
        for stream, text in enumerate(texts):
            drafter.committed(stream, text[:-1], None)
        round = new_round([text[-1] for text in texts], chain(2), {1: 30})
        return [*torch.stack([proposed(drafter, round, row) for row in (0, 1)], 1)]

    (suffix,), (model,) = rows(SuffixDrafter(pair), [REPEATS]), rows(ModelDrafter(pair), [NEW_TEXT])
    chance = float(suffix[0].softmax(-1).max())
    assert int(suffix[0].argmax()) == 30 and 0.4 < chance < 1.0
    for texts in ([REPEATS], [NEW_TEXT], [NEW_TEXT, REPEATS, NEW_TEXT]):
        drafter = FallbackDrafter(pair, SuffixDrafter(pair), ModelDrafter(pair), chance)
        for text, made in zip(texts, rows(drafter, texts), strict=True):
            torch.testing.assert_close(made, suffix if text is REPEATS else model, atol=1e-9, rtol=0)
    (made,) = rows(FallbackDrafter(pair, SuffixDrafter(pair), ModelDrafter(pair), chance + 1e-3), [REPEATS])
    torch.testing.assert_close(made, *rows(ModelDrafter(pair), [REPEATS]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_is_the_targets_alone_and_in_a_batch(pair: Pair, prompt_ids: list[list[int]], temperature: float) -> None:
    prompts = [[*p, *p] for p in prompt_ids[1::2]]
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    expected = plain_texts(pair, prompts, keys, NEW, temperature).tokens
    for batch, other in ((1, ModelDrafter(pair)), (3, ModelDrafter(pair)), (3, small_drafter("layer", pair))):
        drafter = FallbackDrafter(pair, SuffixDrafter(pair), other, 0.4)
        speculator = Speculator(
            pair,
            FixedLength(3),
            Settings(temperature, NEW, tree="2,2,1", verification="match"),
            drafter=drafter,
            batch=batch,
        )
        made = speculator.run([Request(p, key) for p, key in zip(prompts, keys, strict=True)])
        assert [list(g.tokens) for g in made] == expected
        assert sum(r.accepted for g in made for r in g.rounds) > 0


def test_they_are_found_by_name(pair: Pair) -> None:
    found = find_drafter("suffix?confidence=0.75+model", pair)
    assert isinstance(found, FallbackDrafter) and isinstance(found._first, SuffixDrafter)
    assert isinstance(found._other, ModelDrafter) and found._min_confidence == 0.75
    three = find_drafter("suffix+lookup+model", pair)
    assert isinstance(three, FallbackDrafter) and isinstance(three._other, FallbackDrafter)
    names = (
        "suffix+model",
        "suffix?confidence=0.5+model",
        "suffix?confidence=0.6+model",
        "suffix+lookup",
        "lookup+model",
        "model",
    )
    hashes = [with_drafter(pair, name).fingerprint["draft"] for name in names]
    assert hashes[0] == hashes[1] and len(set(hashes)) == len(names) - 1
    assert [with_drafter(pair, name).draft is None for name in names] == [not needs_draft(name) for name in names]
    assert [needs_draft(name) for name in names] == [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("given", "came"),
    [("2", "2"), ("-1", "-1"), ("much", "'much'"), ("", "''"), ("nan", "nan"), ("0.5+modle", "'0.5+modle'")],
)
def test_a_chance_that_is_none_is_refused(pair: Pair, given: str, came: str) -> None:
    name = f"suffix?confidence={given}+model"
    expected = f"drafter: {name!r}: expected for confidence a probability between 0 and 1, not {came}"
    with pytest.raises(InputError, match=re.escape(expected)):
        find_drafter(name, pair)


def test_the_first_has_options_of_its_own(pair: Pair, tmp_path: Path) -> None:
    """A file and what it is searched with, a length, and earlier texts; a plus sign may stand in a path."""
    file = tmp_path / "c++.txt"
    file.write_text("w7 w8 w11")
    found = find_drafter(f"suffix:{file}?keep=1&confidence=0.7+lookup:4+model", pair)
    assert isinstance(found, FallbackDrafter) and isinstance(found._first, SuffixDrafter)
    assert (found.carries, len(found._first._file), found._min_confidence) == (True, 3, 0.7)
    assert isinstance(found._other, FallbackDrafter) and isinstance(found._other._first, LookupDrafter)
    assert (found._other._first._indexes[0].longest, found._other.carries) == (4, False)
    assert isinstance(find_drafter(f"suffix:{file}", pair), SuffixDrafter)
    assert paths_of(f"suffix:{file}?keep=1+medusa:a+b") == [str(file), "a+b"]


@pytest.mark.parametrize("name", ["model+suffix", "model+model"])
def test_the_first_costs_nothing(pair: Pair, name: str) -> None:
    with pytest.raises(InputError, match="expected first one that reads neither hidden states nor a draft model"):
        find_drafter(name, pair)


def test_a_file_is_known_by_what_it_holds(pair: Pair, tmp_path: Path) -> None:
    def known(name: str, text: str, spec: str = "suffix:{}") -> str:
        (tmp_path / name).write_text(text)
        return with_drafter(pair, spec.format(tmp_path / name)).fingerprint["draft"]

    one, moved, other = known("a", "w7 w8"), known("b", "w7 w8"), known("a", "w7 w9")
    assert one == moved == known("c", "w7 w8", "suffix?path={}") != other
    both = [known(name, text, "suffix:{}+model") for name, text in (("a", "w7 w8"), ("b", "w7 w8"), ("a", "w7 w9"))]
    assert both[0] == both[1] != both[2]
