"""The round loop: the text is independent of the policy, even of one that fails, its ends, and the records of the rounds."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, NEW, VOCABULARY, build_model
from contract_policies import TEST_POLICIES, SelectingByToken
from deciders import DECIDERS
from specstop.decode.benchmark import bench
from specstop.decode.drafters.lookup import LookupDrafter
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.records import Generation
from specstop.decode.round_state import RoundState, Rows
from specstop.decode.run import decode
from specstop.decode.settings import Settings, stop_strings
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.registry import load_policy
from specstop.policies.storage import save_policy
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, StoppingCriteria

COUNTS = ("anchor", "context", "drafted", "verified", "accepted", "committed", "decisions", "backlog", "cut")


@pytest.fixture(scope="module")
def endless_pair(pair):
    """The pair without an end of text, with the fast forward."""
    return dataclasses.replace(pair, eos=())


def generate(
    pair: Pair, policy: StopPolicy, prompts: Sequence[list[int]], temperature: float = 0.0, new: int = NEW, **more: Any
) -> list[Generation]:
    tree = more.pop("tree", None)
    speculator = Speculator(pair, policy, Settings(temperature, new, tree=tree, verification="match"), **more)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def plain(pair: Pair, prompts: Sequence[list[int]], temperature: float = 0.0, new: int = NEW) -> list[list[int]]:
    keys = [stream_key(0, f"p{i}") for i in range(len(prompts))]
    return plain_texts(pair, prompts, keys, new, temperature).tokens


def texts(generations: list[Generation]) -> list[list[int]]:
    return [list(g.tokens) for g in generations]


def counts(generation: Generation) -> list[list[Any]]:
    return [[getattr(record, name) for name in COUNTS] for record in generation.rounds]


# Plain decoding


@torch.no_grad()
def slow_text(pair: Pair, prompt: list[int], key: int, temperature: float) -> tuple[list[int], torch.Tensor]:
    """Return the text without cache or mask, and its logits."""
    text, rows = list(prompt), []
    while len(text) < len(prompt) + NEW and text[len(prompt) :][-1:] != [EOS]:
        rows.append(pair.target(torch.tensor([text])).logits[0, -1])
        scores = rows[-1]
        if temperature:
            noise = gumbel(key, torch.tensor([len(text)]), pair.vocabulary, torch.float64)[0]
            scores = torch.log_softmax(scores / temperature, -1) + noise
        text.append(int(scores.argmax()))
    return text[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_padded_batch_of_plain_decoding_has_the_text_and_logits_of_each_prompt(
    plain_pair, eager_pair, prompt_ids, temperature
):
    keys = [5 * i - 7 for i in range(len(prompt_ids))]
    batch = plain_texts(plain_pair, prompt_ids, keys, NEW, temperature)
    assert 0 < sum(text[-1] == EOS for text in batch.tokens) < len(prompt_ids)
    for i, (prompt, key) in enumerate(zip(prompt_ids, keys, strict=True)):
        text, rows = slow_text(plain_pair, prompt, key, temperature)
        assert batch.tokens[i] == text
        torch.testing.assert_close(batch.logits[i, : len(text)], rows, atol=1e-9, rtol=0)
    assert plain_texts(eager_pair, prompt_ids, keys, NEW, temperature).tokens == batch.tokens
    whole = plain_texts(plain_pair, prompt_ids, keys, NEW, temperature, ignore_eos=True).tokens
    assert [text[: len(cut)] for text, cut in zip(whole, batch.tokens, strict=True)] == batch.tokens
    assert all(len(text) == NEW for text in whole)


# Texts


@pytest.mark.parametrize(
    ("name", "temperature"),
    [*((name, 0.0) for name in TEST_POLICIES), *((name, 0.7) for name in (*TEST_POLICIES, "selecting-by-token", *DECIDERS))],
)  # fmt: skip
def test_text_is_that_of_plain_decoding_with_the_same_key(pair, prompt_ids, profile, name, temperature):
    policy = TEST_POLICIES[name] if name in TEST_POLICIES else DECIDERS.get(name, SelectingByToken)()
    for tree, prompts in ((None, prompt_ids[::3]), ("3,2,1", prompt_ids[3:5]), ("parents:-1,-1,1,2", prompt_ids[5:6])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # policies that fail
            generations = generate(pair, policy, prompts, temperature, profile=profile, tree=tree)
        assert texts(generations) == plain(pair, prompts, temperature)


@pytest.mark.parametrize("tree", [None, "3,2,1", "fork:2x5"])
@pytest.mark.parametrize("new", [1, 2, 6])
def test_the_length_limit_is_met_exactly_and_never_drafted_over(endless_pair, prompt_ids, new, tree):
    for policy in (FixedLength(5), TEST_POLICIES["trimming"]):
        generations = generate(endless_pair, policy, prompt_ids, 0.7, new, tree=tree)
        assert texts(generations) == plain(endless_pair, prompt_ids, 0.7, new)
        for generation in generations:
            assert len(generation.tokens) == new
            for r in generation.rounds:
                left = new - r.anchor - 1  # tokens that may still be accepted: one place is the target's
                assert r.drafted <= Settings(0.0, new, tree=tree).topology.limited(left).nodes


def test_verification_padded_to_a_cheaper_size_stays_within_learned_positions(profile):
    torch.manual_seed(0)
    options = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": None}
    models = [GPT2LMHeadModel(GPT2Config(n_positions=24, **options)).double().eval() for _ in range(2)]
    table = dataclasses.replace(profile.low, verify_s=tuple(9.0 - k for k in range(7)))
    decreasing = dataclasses.replace(profile, low=table, high=table)
    expected = texts(generate(join(*models), FixedLength(0), [[6, 7, 8, 9]], new=20))
    for costs in (None, decreasing):
        assert texts(generate(join(*models), FixedLength(2), [[6, 7, 8, 9]], new=20, profile=costs)) == expected


# Rounds


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_records_add_up_and_on_commit_receives_the_tokens(pair, prompt_ids, temperature):
    speculator = Speculator(pair, FixedLength(4), Settings(temperature, NEW, verification="match"))
    for key, prompt in enumerate(prompt_ids):
        parts: list[list[int]] = []
        (generation,) = speculator.run([Request(prompt, key)], lambda _, new, parts=parts: parts.append(list(new)))
        assert [t for part in parts for t in part] == list(generation.tokens)
        assert [len(part) for part in parts] == [1, *(r.committed for r in generation.rounds)]
        at, unread = 1, len(prompt) + 1
        for r in generation.rounds:
            assert (r.anchor, r.context, r.backlog) == (at, len(prompt) + at, unread)
            assert r.accepted <= r.verified <= r.drafted <= 4
            assert r.committed == r.accepted + 1 or r is generation.rounds[-1]
            at += r.committed
            read = r.context + min(r.accepted, r.drafted - 1) if r.drafted else r.context - r.backlog
            unread = len(prompt) + at - read
        assert at == len(generation.tokens)
        assert [r.cut for r in generation.rounds[-1:]] in ([True], [])


# Policies that fail or change their arguments


class Plugin(StopPolicy):
    """Drafts two tokens; a fault replaces one of its methods."""

    name, features, max_depth = "plugin", ("top1",), 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < 2), state


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("inside a plugin")


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {  # tests of `PolicyHost` cover all exceptions and invalid answers
    **{f"raises in {method}": {method: fail} for method in ("keep", "start", "observe", "select")},
    "fails at depth 2": {"keep": lambda self, step, state: fail() if step.depth == 2 else (step.alive, state)},
}
HARMLESS: dict[str, dict[str, Callable[..., Any]]] = {
    "selects orphans": {"select": lambda self, tree, state: tree.depth != 1},
    "changes the tree": {"select": lambda self, tree, state: np.add(tree.tokens, 7, tree.tokens) > 0},
}


@pytest.mark.parametrize("name", [*FAULTS, *HARMLESS])
@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_a_policy_that_fails_is_replaced_with_one_warning_and_the_text_stays(pair, prompt_ids, name, tree):
    policy: StopPolicy = type("Broken", (Plugin,), (FAULTS | HARMLESS)[name])()
    settings = Settings(0.7, NEW, 4, fallback=1, tree=tree, verification="match")
    speculator = Speculator(pair, policy, settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generations = [speculator.generate(p, stream_key(0, f"p{i}")) for i, p in enumerate(prompt_ids[:3])]
    assert texts(generations) == plain(pair, prompt_ids[:3], 0.7)
    messages = [str(w.message) for w in caught if issubclass(w.category, SpecstopWarning)]
    if name in HARMLESS:
        assert not messages and speculator.policy.name == "plugin"
        return
    (message,) = messages
    assert "plugin" in message and "fixed:1" in message and next(iter(FAULTS[name])) in message
    assert speculator.policy.name == "fixed:1"
    speculator.reset()
    assert speculator.policy.name == "plugin", "alternating runs call it again"


# Resources


def test_a_round_that_was_interrupted_does_not_spoil_later_ones(pair, prompt_ids):
    class Interrupted(LookupDrafter):
        calls = 0

        def propose(self, round: RoundState, depth: int, rows: Rows) -> Any:
            Interrupted.calls += 1
            if Interrupted.calls == 4:
                raise KeyboardInterrupt
            return super().propose(round, depth, rows)

    settings = Settings(0.0, NEW, tree="2,1,1")
    loop = Speculator(pair, load_policy("eagle:4"), settings, drafters=[Interrupted(pair)], batch=2)
    with pytest.raises(KeyboardInterrupt):
        loop.run([Request(prompt_ids[3]), Request(prompt_ids[4])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (text,) = loop.run([Request(prompt_ids[5])])
    assert list(text.tokens) == plain(pair, [prompt_ids[5]])[0]
    assert loop.policy.name.startswith("eagle")


RUNS = [
    *((spec, tree, "match") for spec in ("fixed:3", "confidence:0.4", "eagle:8", "opt:0.5")
      for tree in (None, "3,2,1")),
    ("entropy:1", "2,2", "rejection"),
]  # fmt: skip


@pytest.fixture
def restored_defaults():
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("restored_defaults")
def test_the_loop_does_not_depend_on_the_defaults_of_torch(pair, prompt_ids):
    def run() -> list[Any]:
        runs = []
        for spec, tree, mode in RUNS:
            settings = Settings(0.7, 10, 4, tree=tree, verification=mode)
            generation = Speculator(pair, load_policy(spec), settings).generate(prompt_ids[3], 7)
            runs.append((spec, tree, generation.tokens, counts(generation)))
        return runs

    expected = run()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    assert run() == expected


# Arguments


def test_a_prompt_must_have_tokens_and_fit_the_models(pair):
    short = join(pair.target, build_model(max_position_embeddings=64))
    for used, length, noun in (
        (pair, 101, "target .*128"),
        (short, 40, "draft .*64"),
        (pair, 0, "empty"),
        (pair, 100, ""),
    ):
        speculator = Speculator(used, FixedLength(4), Settings(max_new_tokens=28))
        if noun:
            with pytest.raises(InputError, match=noun):
                speculator.generate([7] * length)
        else:
            assert speculator.generate([7] * length).tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", math.nan), ("max_new_tokens", 0), ("max_depth", -1), ("fallback", -1),
     ("verification", "macth"), ("tree", "2,x"), ("tree", ""), ("drift", "on"), ("stops", ("w9",)), ("sampling", None),
     ("stops", "w9"), ("tree", 5), ("tree", [4, 2]), ("tree", "9" * 5000), ("tree", "chain:" + "9" * 5000)],
)  # fmt: skip
def test_settings_are_validated_at_construction(name, value):
    with pytest.raises(InputError, match=name) as caught:
        Settings(**{name: value})
    assert "--" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_policy_may_be_a_spec_or_a_folder(pair, prompts, learned, tmp_path):
    settings, text = Settings(0.0, 8), prompts[5].text
    expected = decode(pair, text, FixedLength(3), settings=settings)
    named = decode(pair, text, "fixed:3", settings=settings)
    assert (named.tokens, len(named.rounds)) == (expected.tokens, len(expected.rounds))
    save_policy(learned, tmp_path / "policy")
    for place in (tmp_path / "policy", str(tmp_path / "policy")):
        with pytest.warns(SpecstopWarning, match="temperature"):
            assert decode(pair, text, place, settings=settings).tokens == expected.tokens
    assert [line.name for line in bench(pair, text, "fixed:2", settings=settings)] == ["plain", "fixed:2"]
    for policy, noun in (("fixd:3", "did you mean"), (Misspelt(2), r"draft_hiden.*did you mean 'draft_hidden'")):
        with pytest.raises(PolicyError, match=noun):
            decode(pair, text, policy)


class Misspelt(FixedLength):
    """Reads hidden states that do not exist."""

    hidden = ("draft_hiden",)


# Ends of text inside a round: stop strings, several end tokens, criteria, time limits; with chains and trees


TREES = [None, "3,2,1", "fork:2x5"]


@pytest.fixture(scope="module")
def twin(pair):
    """Draft and target are the same: every chain is accepted to its end."""
    return join(pair.target, pair.target, pair.tokenizer)


@pytest.fixture(scope="module")
def letters():
    """One or two letters a token, so that a string may begin and end inside tokens."""
    words = [*"abcdefghijklmnopqrstuvwxyz ", *(first + second for first in "aeiou" for second in "stnr")]
    ids = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS}
    free = (i for i in range(3, VOCABULARY) if i != EOS)
    inner = Tokenizer(BPE({**ids, **dict(zip(words, free, strict=False))}, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def decoded(pair: Pair, prompts: list[list[int]], settings: Settings, length: int = 5) -> list[Generation]:
    speculator = Speculator(pair, FixedLength(length), settings)
    return [speculator.generate(prompt, stream_key(0, f"p{i}")) for i, prompt in enumerate(prompts)]


def library_text(pair: Pair, prompt: list[int], **options: Any) -> list[int]:
    """Return what `generate` of transformers adds."""
    ids = torch.tensor([prompt])
    out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options)
    return out[0, len(prompt) :].tolist()


def ends_in_a_round(generations: list[Generation]) -> bool:
    """Return whether a text ended in the middle of accepted tokens."""
    return any(0 < g.rounds[-1].committed <= g.rounds[-1].accepted for g in generations if g.rounds)


@pytest.fixture(scope="module")
def whole(plain_pair, prompt_ids):
    return [library_text(plain_pair, prompt) for prompt in prompt_ids]


@pytest.mark.parametrize("models", ["twin", "pair"])
def test_a_stop_string_ends_the_text_as_in_generate(models, request, plain_pair, letters, prompt_ids, whole):
    """One token, the end of one and the beginning of the next, and a string that never comes."""
    pair = dataclasses.replace(request.getfixturevalue(models), tokenizer=letters)
    long = [letters.decode(text) for text in whole if len(text) > 10]
    strings = [long[0][7:10], long[1][8:9] + "Q", long[2][6:10]]
    expected = [library_text(plain_pair, p, stop_strings=strings, tokenizer=letters) for p in prompt_ids]
    assert sum(len(text) < len(uncut) for text, uncut in zip(expected, whole, strict=True)) >= 2
    for tree in TREES:
        settings = Settings(0.0, NEW, tree=tree, stops=stop_strings(pair, strings))
        generations = decoded(pair, prompt_ids, settings)
        assert [list(g.tokens) for g in generations] == expected
        assert models == "pair" or ends_in_a_round(generations)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_of_several_end_tokens_ends_the_text(twin, prompt_ids, tree, temperature):
    """Also where another branch of the tree drew an end that is not the text's."""
    several = dataclasses.replace(twin, eos=(16, 9, 30, 41))
    keys = [stream_key(0, f"p{i}") for i in range(len(prompt_ids))]
    expected = plain_texts(several, prompt_ids, keys, NEW, temperature).tokens
    generations = decoded(several, prompt_ids, Settings(temperature, NEW, tree=tree, verification="match"))
    assert [list(g.tokens) for g in generations] == expected
    assert len({text[-1] for text in expected if text[-1] in several.eos}) > 1
    assert not any(set(g.tokens[:-1]) & set(several.eos) for g in generations)
    assert all(g.rounds[-1].cut for g in generations if g.rounds and g.tokens[-1] in several.eos)
    assert ends_in_a_round(generations)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_after_an_end_of_text_do_not_count(pair, prompt_ids, temperature):
    """A fixed length does not read its tokens while it drafts them; the records are those of a policy that does."""
    settings, ended = Settings(temperature, 40, verification="match"), 0
    for eos in range(0, 48, 8):
        ending = dataclasses.replace(pair, eos=(eos,))
        fixed, reading = (
            [Speculator(ending, policy, settings).generate(prompt, 1) for prompt in prompt_ids[:3]]
            for policy in (FixedLength(4), Confidence(0.0, 4))
        )
        for text, other in zip(fixed, reading, strict=True):
            assert text.tokens == other.tokens
            rounds, others = (
                [(r.drafted, r.verified, r.accepted, r.committed, r.cut, r.backlog) for r in one.rounds]
                for one in (text, other)
            )
            assert rounds == others
            ended += sum(r.drafted < 4 and r.context < len(text.tokens) for r in text.rounds)
    assert ended > 1


class AtToken(StoppingCriteria):
    """Records its calls and stops after a token."""

    def __init__(self, token: int = -1) -> None:
        self.token, self.calls = token, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append(input_ids[0].tolist())
        return torch.tensor([int(input_ids[0, -1]) == self.token])


@pytest.mark.parametrize("tree", TREES)
def test_criteria_are_called_after_each_token_in_order_and_end_the_text(twin, prompt_ids, whole, tree):
    for prompt, expected in zip(prompt_ids[::2], whole[::2], strict=True):
        criterion = AtToken()
        (text,) = decoded(twin, [prompt], Settings(0.0, NEW, tree=tree, stops=(criterion,)))
        assert list(text.tokens) == expected
        has_ended = text.tokens[-1] in twin.eos or len(text.tokens) == NEW
        assert criterion.calls == [[*prompt, *text.tokens[: n + 1]] for n in range(len(text.tokens) - has_ended)]
        late, early = AtToken(expected[-1]), AtToken(expected[len(expected) // 2])
        (text,) = decoded(twin, [prompt], Settings(0.0, NEW, tree=tree, stops=(late, early)))
        assert list(text.tokens) == expected[: 1 + expected.index(early.token)], "the first that fires ends the text"


def test_stop_strings_require_text_and_a_tokenizer_that_can_be_searched(pair):
    assert stop_strings(pair, []) == ()
    for models, strings in ((pair, ["w7"]), (pair, ["w7", ""]), (join(pair.target, pair.draft), ["w7"])):
        with pytest.raises(InputError, match=r"^stops: .*tokenizer"):
            stop_strings(models, strings)
