"""Structured output: texts that obey a schema or grammar, equal to plain constrained decoding, whatever is drafted."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from byte_pair import END, PERSON, byte_pair, is_person
from specstop.decode.drafters import with_drafter
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.verify.grammar import Grammar
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

EBNF = 'root ::= "<" [a-c]{1,3} ("," [0-9]+)? ">"'
LARK = 'start: "<" /[a-c]{1,3}/ ("," /[0-9]+/)? ">"'
PATTERN = r"<[a-c]{1,3}(,[0-9]+)?>"
NEW = 90

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def bytes_pair() -> Pair:
    return byte_pair()


@pytest.fixture(scope="module")
def bytes_tokenizer(bytes_pair: Pair) -> PreTrainedTokenizerFast:
    return bytes_pair.tokenizer


@pytest.fixture(scope="module")
def asks(bytes_tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [bytes_tokenizer(text)["input_ids"] for text in ("the name", '{"age": 4', "a tag, ok?")]


def person(tokenizer: PreTrainedTokenizerFast) -> Grammar:
    return Grammar.from_json_schema(PERSON, tokenizer)


def decoded(pair: Pair, prompts: list[list[int]], settings: Settings, depth: int, batch: int = 1) -> list[list[int]]:
    requests = [Request(prompt, stream_key(5, str(at))) for at, prompt in enumerate(prompts)]
    made = Speculator(pair, FixedLength(depth), settings, batch=batch).run(requests)
    return [list(one.tokens) for one in made]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", ["model", "lookup", "suffix"])
def test_texts_are_those_of_plain_constrained_decoding(
    bytes_pair: Pair, asks: list[list[int]], temperature: float, drafter: str
) -> None:
    grammar = person(bytes_pair.tokenizer)  # type: ignore[arg-type]
    sampling = SamplingParams(processors=(grammar,))
    keys = [stream_key(5, str(at)) for at in range(len(asks))]
    expected = plain_texts(bytes_pair, asks, keys, NEW, temperature, sampling=sampling).tokens
    pair = with_drafter(bytes_pair, drafter)
    for depth, tree, batch in ((0, None, 1), (4, None, 1), (2, "2,2", 1), (3, None, 3), (2, "2,2", 3)):
        settings = Settings(temperature, NEW, tree=tree, verification="match", sampling=sampling)
        assert decoded(pair, asks, settings, depth, batch) == expected
    assert len(set(map(tuple, expected))) > 1
    for text in expected:
        assert is_person(bytes_pair.tokenizer.decode(text, skip_special_tokens=True))  # type: ignore[union-attr]
        assert grammar.matches(text, bytes_pair.eos) and not grammar.matches(text[:-2], bytes_pair.eos)


@pytest.mark.parametrize("verification", ["rejection", "block", "rejection_replace", "typical"])
def test_every_verification_keeps_to_the_grammar(bytes_pair: Pair, asks: list[list[int]], verification: str) -> None:
    grammar = person(bytes_pair.tokenizer)  # type: ignore[arg-type]
    sampling = SamplingParams(processors=(grammar,), top_p=0.95, repetition_penalty=1.1)
    for tree in (None, "2,2") if verification != "block" else (None,):
        settings = Settings(0.7, NEW, tree=tree, sampling=sampling, verification=verification)
        for text in decoded(bytes_pair, asks, settings, 3, batch=2):
            assert grammar.matches(text, bytes_pair.eos)
    greedy = Settings(0.0, NEW, sampling=SamplingParams(processors=(grammar,)), verification=verification)
    if verification != "typical":
        assert decoded(bytes_pair, asks, greedy, 3) == decoded(bytes_pair, asks, greedy, 0)


def test_candidates_obey_so_that_they_are_accepted_as_without_a_grammar(
    bytes_pair: Pair, asks: list[list[int]]
) -> None:
    same = join(bytes_pair.target, bytes_pair.target, bytes_pair.tokenizer)
    sampling = SamplingParams(processors=(person(bytes_pair.tokenizer),))  # type: ignore[arg-type]
    made = Speculator(same, FixedLength(4), Settings(0.0, NEW, sampling=sampling)).run([Request(asks[0])])
    assert all(one.accepted == one.drafted or one.cut for one in made[0].rounds)


@pytest.mark.parametrize("source", [EBNF, LARK])
def test_a_grammar_in_ebnf_or_lark(bytes_pair: Pair, asks: list[list[int]], source: str) -> None:
    grammar = Grammar.from_text(source, bytes_pair.tokenizer)  # type: ignore[arg-type]
    settings = Settings(0.7, 200, verification="match", sampling=SamplingParams(processors=(grammar,)))
    for text in decoded(bytes_pair, asks, settings, 4):
        words = bytes_pair.tokenizer.decode(text, skip_special_tokens=True)  # type: ignore[union-attr]
        assert re.fullmatch(PATTERN, words) and text[-1] == END


@pytest.mark.parametrize("sampling", [False, True])
def test_generate_takes_a_grammar_as_a_processor(bytes_pair: Pair, asks: list[list[int]], sampling: bool) -> None:
    """Side by side, padded on the left; each text is the one of its prompt alone."""
    tokenizer: Any = bytes_pair.tokenizer
    longest = max(map(len, asks))
    options: dict[str, Any] = {
        "max_new_tokens": NEW, "do_sample": sampling, "custom_generate": specstop_generate, "policy": "fixed:3",
        "draft_model": bytes_pair.draft, **({"temperature": 0.7, "top_k": 20, "seed": 3} if sampling else {}),
    }  # fmt: skip
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asks])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asks])
    processors = LogitsProcessorList([person(tokenizer)])
    made = bytes_pair.target.generate(ids, attention_mask=mask, logits_processor=processors, **options)
    for row, prompt in zip(made, asks, strict=True):
        words = tokenizer.decode(row[longest:], skip_special_tokens=True)
        assert is_person(words)
        if not sampling:
            alone = torch.tensor([prompt])
            text = bytes_pair.target.generate(
                alone, attention_mask=torch.ones_like(alone), logits_processor=processors, **options
            )
            assert tokenizer.decode(text[0, len(prompt) :], skip_special_tokens=True) == words


@pytest.mark.skipif(not importlib.util.find_spec("xgrammar"), reason="missing")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("policy", ["fixed:0", "fixed:1", "fixed:4"])
def test_xgrammars_own_processor_writes_what_generate_writes_with_it(
    bytes_pair: Pair, asks: list[list[int]], policy: str, used: bool, rows: int
) -> None:
    """With one grammar for all rows of a batch; and again after it was used, which the library forbids."""
    import xgrammar

    # The library masks scores of at most 32 bits.
    target, draft = (copy.deepcopy(model).float() for model in (bytes_pair.target, bytes_pair.draft_model))
    known = xgrammar.TokenizerInfo.from_huggingface(bytes_pair.tokenizer, vocab_size=bytes_pair.vocabulary)
    compiled = xgrammar.GrammarCompiler(known).compile_json_schema(json.dumps(PERSON))
    ids = torch.tensor([asks[0][:3], asks[2][:3]][:rows])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
    fresh = xgrammar.contrib.hf.LogitsProcessor(compiled)
    expected = target.generate(ids, logits_processor=LogitsProcessorList([fresh]), **options)
    for _ in range(1 + used):
        made = target.generate(
            ids, logits_processor=LogitsProcessorList([processor]), custom_generate=specstop_generate,
            draft_model=draft, policy=policy, tree="2,2" if policy == "fixed:4" else None, **options,
        )  # fmt: skip
        assert made.tolist() == expected.tolist()
    assert not processor.matchers


@pytest.mark.skipif(not importlib.util.find_spec("xgrammar"), reason="missing")
def test_a_grammar_for_each_row_is_refused(bytes_pair: Pair, asks: list[list[int]]) -> None:
    import xgrammar

    known = xgrammar.TokenizerInfo.from_huggingface(bytes_pair.tokenizer, vocab_size=bytes_pair.vocabulary)
    compiler = xgrammar.GrammarCompiler(known)
    compiled = [compiler.compile_json_schema(json.dumps(PERSON)), compiler.compile_grammar('root ::= [^!]{4} "!"')]
    ids = torch.tensor([asks[0][:3], asks[2][:3]])
    with pytest.raises(InputError, match="rows of a batch"):
        bytes_pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
            logits_processor=LogitsProcessorList([xgrammar.contrib.hf.LogitsProcessor(compiled)]),
            custom_generate=specstop_generate, draft_model=bytes_pair.draft,
        )  # fmt: skip


class ByXGrammar(LogitsProcessor):
    """As many write it themselves: a matcher between calls, which asserts that it is told of every token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        import xgrammar

        self.known = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self.compiled = xgrammar.GrammarCompiler(self.known).compile_grammar(EBNF)
        self.matchers = [xgrammar.GrammarMatcher(self.compiled)]
        self.bits = xgrammar.allocate_token_bitmask(1, self.known.vocab_size)
        self.begun = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.begun:
            assert self.matchers[0].accept_token(int(input_ids[0, -1]))
        self.begun = True
        self.matchers[0].fill_next_token_bitmask(self.bits)
        allowed = ((self.bits[0, :, None] >> torch.arange(32)) & 1).flatten().bool()[: self.known.vocab_size]
        return scores.masked_fill(~torch.nn.functional.pad(allowed, (0, scores.shape[1] - len(allowed))), -torch.inf)


class ByLLGuidance(LogitsProcessor):
    """The same with llguidance."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        self.known = from_tokenizer(tokenizer)
        self.matcher = LLMatcher(self.known, LLMatcher.grammar_from_lark(LARK))
        self.length = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.length:
            assert input_ids.shape[1] == self.length + 1 and self.matcher.consume_token(int(input_ids[0, -1]))
        self.length = input_ids.shape[1]
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: self.known.vocab_size].astype(bool))
        return scores.masked_fill(~torch.nn.functional.pad(allowed, (0, scores.shape[1] - len(allowed))), -torch.inf)


@pytest.mark.parametrize("kind", [ByXGrammar, ByLLGuidance])
@pytest.mark.parametrize("tree", [None, "2,2"])
def test_processors_of_ones_own_that_keep_a_matcher_follow_candidates(
    bytes_pair: Pair, asks: list[list[int]], kind: Any, tree: str | None
) -> None:
    pytest.importorskip(kind.__name__[2:].lower())
    ids = torch.tensor([asks[0]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    expected = bytes_pair.target.generate(
        ids, logits_processor=LogitsProcessorList([kind(bytes_pair.tokenizer)]), **options
    )
    processor = kind(bytes_pair.tokenizer)
    for _ in range(2):
        made = bytes_pair.target.generate(
            ids, logits_processor=LogitsProcessorList([processor]), custom_generate=specstop_generate,
            draft_model=bytes_pair.draft, tree=tree, **options,
        )  # fmt: skip
        assert made.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ("[1]", "object"),
        ("{", "JSON"),
        ('{"type": "null", "type": "string"}', "twice"),
        ('{"type": "objekt"}', "objekt"),
        ("false", "false"),
    ],
)
def test_an_invalid_schema_is_refused_in_one_line(
    bytes_tokenizer: PreTrainedTokenizerFast, schema: str, fault: str
) -> None:
    with pytest.raises(InputError, match=f"json-schema: expected .*{fault}") as error:
        Grammar.from_json_schema(schema, bytes_tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["root ::= [^!", 'root ::= missing "a"', "start: MISSING", ""])
def test_an_invalid_grammar_is_refused_in_one_line(bytes_tokenizer: PreTrainedTokenizerFast, source: str) -> None:
    with pytest.raises(InputError, match="grammar: expected") as error:
        Grammar.from_text(source, bytes_tokenizer)
    assert "\n" not in str(error.value)


def test_a_schema_that_llguidance_does_not_support_is_refused(bytes_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="not"):
        Grammar.from_json_schema({"not": {"type": "string"}}, bytes_tokenizer)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    bytes_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'specstop\[grammar\]'"):
        Grammar.from_json_schema(PERSON, bytes_tokenizer)


def test_options_that_leave_no_token_are_refused(bytes_pair: Pair, asks: list[list[int]]) -> None:
    """The grammar is complete, and no text may end yet: plain decoding would go on with token 0."""
    grammar = Grammar.from_text('root ::= "ab"', bytes_pair.tokenizer)  # type: ignore[arg-type]
    sampling = SamplingParams(min_new_tokens=9, processors=(grammar,))
    for depth, tree in ((0, None), (3, None), (2, "2,2")):
        for temperature in (0.0, 0.7):
            with pytest.raises(InputError, match="leave no token"):
                decoded(bytes_pair, asks, Settings(temperature, NEW, tree=tree, sampling=sampling), depth)
    with pytest.raises(InputError, match="leave no token"):
        plain_texts(bytes_pair, asks, [0] * 3, NEW, sampling=sampling)


def test_ends_of_text_are_those_of_the_run(bytes_pair: Pair, asks: list[list[int]]) -> None:
    """Several, of which one is padding and one a letter that the grammar allows: it ends a text only where that is whole."""
    letter = bytes_pair.tokenizer("b")["input_ids"][0]  # type: ignore[misc]
    pair = dataclasses.replace(bytes_pair, eos=(END, letter, bytes_pair.vocabulary - 1))
    grammar = Grammar.from_text("root ::= [a-c]{5}", bytes_pair.tokenizer)  # type: ignore[arg-type]
    for seed in range(4):
        prompts = [[*prompt, seed + 40] for prompt in asks]
        settings = Settings(1.0, NEW, sampling=SamplingParams(processors=(grammar,)))
        for text in decoded(pair, prompts, settings, 3):
            assert text[-1] in (END, letter) and letter not in text[:-1]
            assert len(bytes_pair.tokenizer.decode(text[:-1])) == 5  # type: ignore[union-attr]


def test_a_text_that_could_never_end_is_refused(bytes_pair: Pair, asks: list[list[int]]) -> None:
    sampling = SamplingParams(processors=(person(bytes_pair.tokenizer),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="end-of-text"):
        decoded(bytes_pair, asks, Settings(0.0, NEW, ignore_eos=True, sampling=sampling), 2)
