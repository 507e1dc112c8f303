"""Structured output: texts obey a schema or grammar and equal plain constrained decoding, whatever is drafted."""

from __future__ import annotations

import dataclasses
import re

import pytest
from byte_pair import END, PERSON, byte_pair, is_person
from specstop.decode.drafters import with_drafter
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.verify.grammar import Grammar
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

EBNF = 'root ::= "<" [a-c]{1,3} ("," [0-9]+)? ">"'
LARK = 'start: "<" /[a-c]{1,3}/ ("," /[0-9]+/)? ">"'
NEW = 90

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def pair():
    return byte_pair()


@pytest.fixture(scope="module")
def tokenizer(pair):
    return pair.tokenizer


@pytest.fixture(scope="module")
def questions(tokenizer):
    return [tokenizer(text)["input_ids"] for text in ("the name", '{"age": 4', "a tag, ok?")]


@pytest.fixture(scope="module")
def person(tokenizer):
    return Grammar.from_json_schema(PERSON, tokenizer)


def decoded(pair: Pair, prompts: list[list[int]], settings: Settings, depth: int, batch: int = 1) -> list[list[int]]:
    requests = [Request(prompt, stream_key(5, str(at))) for at, prompt in enumerate(prompts)]
    return [list(text.tokens) for text in Speculator(pair, FixedLength(depth), settings, batch=batch).run(requests)]


@pytest.mark.parametrize(("temperature", "drafter"), [(0.0, "model"), (0.7, "model"), (0.0, "lookup"), (0.7, "suffix")])
def test_texts_are_those_of_plain_constrained_decoding(pair, questions, person, temperature, drafter):
    sampling = SamplingParams(processors=(person,))
    keys = [stream_key(5, str(at)) for at in range(len(questions))]
    expected = plain_texts(pair, questions, keys, NEW, temperature, sampling=sampling).tokens
    for depth, tree, batch in ((4, None, 1), (2, "2,2", 1), (3, None, 3), (2, "2,2", 3)):
        settings = Settings(temperature, NEW, tree=tree, verification="match", sampling=sampling)
        assert decoded(with_drafter(pair, drafter), questions, settings, depth, batch) == expected
    for text in expected:
        assert is_person(pair.tokenizer.decode(text, skip_special_tokens=True))
        assert person.matches(text, pair.eos) and not person.matches(text[:-2], pair.eos)


@pytest.mark.parametrize("verification", ["rejection", "block", "rejection_replace", "typical"])
def test_every_verification_obeys_the_grammar(pair, questions, person, verification):
    sampling = SamplingParams(processors=(person,), top_p=0.95, repetition_penalty=1.1)
    for tree in (None, "2,2") if verification != "block" else (None,):
        settings = Settings(0.7, NEW, tree=tree, sampling=sampling, verification=verification)
        assert all(person.matches(text, pair.eos) for text in decoded(pair, questions, settings, 3, batch=2))


@pytest.mark.parametrize("source", [EBNF, LARK])
def test_a_grammar_in_ebnf_or_lark(pair, tokenizer, questions, source):
    sampling = SamplingParams(processors=(Grammar.from_text(source, tokenizer),))
    for text in decoded(pair, questions, Settings(0.7, 200, verification="match", sampling=sampling), 4):
        words = tokenizer.decode(text, skip_special_tokens=True)
        assert re.fullmatch(r"<[a-c]{1,3}(,[0-9]+)?>", words) and text[-1] == END


@pytest.mark.parametrize(
    ("method", "source", "noun"),
    [
        ("from_json_schema", "[1]", "object"), ("from_json_schema", "{", "JSON"), ("from_json_schema", "false", "false"),
        ("from_json_schema", '{"type": "null", "type": "string"}', "twice"),
        ("from_json_schema", '{"type": "objekt"}', "objekt"), ("from_text", "", "grammar"),
        ("from_json_schema", {"not": {"type": "string"}}, "not"), ("from_text", "root ::= [^!", "grammar"),
        ("from_text", 'root ::= missing "a"', "grammar"), ("from_text", "start: MISSING", "grammar"),
    ],
)  # fmt: skip
def test_an_invalid_schema_or_grammar_is_refused_in_one_line(tokenizer, method, source, noun):
    with pytest.raises(InputError, match=noun) as error:
        getattr(Grammar, method)(source, tokenizer)
    assert "\n" not in str(error.value)


def test_options_that_leave_no_token_or_no_end_are_refused(pair, tokenizer, questions, person):
    """The grammar is complete, and no text may end yet: plain decoding would continue with token 0."""
    sampling = SamplingParams(min_new_tokens=9, processors=(Grammar.from_text('root ::= "ab"', tokenizer),))
    for depth, tree, temperature in ((0, None, 0.0), (3, None, 0.7), (2, "2,2", 0.0)):
        with pytest.raises(InputError, match="no token"):
            decoded(pair, questions, Settings(temperature, NEW, tree=tree, sampling=sampling), depth)
    with pytest.raises(InputError, match="no token"):
        plain_texts(pair, questions, [0] * 3, NEW, sampling=sampling)
    with pytest.raises(InputError, match="end-of-text"):
        decoded(pair, questions, Settings(0.0, NEW, ignore_eos=True, sampling=SamplingParams(processors=(person,))), 2)


def test_ends_of_text_are_those_of_the_run(pair, tokenizer, questions):
    """One is padding and one a letter that the grammar allows: it ends a text only where the grammar is complete."""
    letter = tokenizer("b")["input_ids"][0]
    several = dataclasses.replace(pair, eos=(END, letter, pair.vocabulary - 1))
    sampling = SamplingParams(processors=(Grammar.from_text("root ::= [a-c]{5}", tokenizer),))
    for seed in range(2):
        prompts = [[*prompt, seed + 40] for prompt in questions]
        for text in decoded(several, prompts, Settings(1.0, NEW, sampling=sampling), 3):
            assert text[-1] in (END, letter) and letter not in text[:-1]
            assert len(tokenizer.decode(text[:-1])) == 5
