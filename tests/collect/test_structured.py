"""Traces of structured output: replay is the live loop, texts obey, the header names the grammar."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_scripts import part
from byte_pair import PERSON, byte_pair
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import Pair
from specstop.decode.verify.grammar import Grammar
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import TraceError

pytest.importorskip("llguidance")
same_rounds = part("same_rounds", of="filtered")
PROMPTS = [Prompt(str(at), text) for at, text in enumerate(("the name", '{"age": 4', "a tag", "ok?"))]
NEW = 90


@pytest.fixture(scope="module")
def bytes_pair() -> Pair:
    return byte_pair()


@pytest.fixture(scope="module")
def grammar(bytes_pair: Pair) -> Grammar:
    assert bytes_pair.tokenizer is not None
    return Grammar.from_json_schema(PERSON, bytes_pair.tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", [None, "2,2,1,1,1"])
def test_replay_under_a_grammar_is_the_live_loop(
    bytes_pair: Pair, grammar: Grammar, tmp_path: Path, temperature: float, tree: str | None
) -> None:
    sampling = SamplingParams(processors=(grammar,))
    found = same_rounds.same_rounds(bytes_pair, PROMPTS, NEW, sampling, temperature, tree, tmp_path / "trace")
    assert found.rounds > 50
    assert (found.wrong, found.not_finite) == (0, 0)


@pytest.mark.parametrize("collector", ["dense", "live"])
def test_the_header_names_the_grammar_and_resume_wants_the_same(
    bytes_pair: Pair, grammar: Grammar, tmp_path: Path, collector: str
) -> None:
    options = {"depth": 3, "max_new_tokens": NEW, "temperature": 0.7, "collector": collector, "verification": "match"}
    trace = collect(bytes_pair, PROMPTS, tmp_path / "a", sampling=SamplingParams(processors=(grammar,)), **options)
    assert trace.header.sampling == {"processors": [grammar.name]}
    other = Grammar.from_text("root ::= [a-c]{5}", bytes_pair.tokenizer)  # type: ignore[arg-type]
    for sampling in (SamplingParams(), SamplingParams(processors=(other,))):
        with pytest.raises(TraceError, match="another sampling"):
            collect(bytes_pair, PROMPTS, tmp_path / "a", sampling=sampling, resume=True, **options)
