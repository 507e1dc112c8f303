"""The Hugging Face surface: `generate` with our loop, and our policies on the stock loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from assisted_policies import ByPath, ByTokens
from conftest import EOS, NEW
from contract_policies import TEST_POLICIES, SelectingByToken
from specstop.collect.store.folder import Trace
from specstop.decode import (
    PolicyStoppingCriteria,
    Settings,
    Shaping,
    Speculator,
    plain_texts,
    specstop_generate,
    stream_key,
)
from specstop.decode.models.pair import Pair, join
from specstop.policies.baselines.fixed import Confidence, FixedLength
from specstop.policies.contract import Array, RoundOutcome, State, StopPolicy
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.latency.profile import Profile
from specstop.policies.storage.registry import load_policy
from specstop.train.fit.run import train
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


def inputs(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """A batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def ours(pair: Pair, prompts: Sequence[Sequence[int]], **more: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "policy": "fixed:3", "draft_model": pair.draft, **more}
    return pair.target.generate(**inputs(prompts), custom_generate=specstop_generate, **options)


def stock(pair: Pair, prompts: Sequence[Sequence[int]], **more: Any) -> Tensor:
    return pair.target.generate(**inputs(prompts), **{"max_new_tokens": NEW, "do_sample": False, **more})


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": Confidence(0.4)}, {"tree": "3,2,1"}, {"verification": "rejection", "tree": "2,2"},
     {"drafter": "lookup", "draft_model": None}, {"drafter": "lookup:2", "draft_model": None, "tree": "3,1"}],
    ids=lambda o: "-".join(getattr(v, "name", str(v)) for v in o.values()) or "chain",
)  # fmt: skip
def test_greedy_text_is_that_of_generate(pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any]) -> None:
    for prompt in prompt_ids[1::3]:
        assert torch.equal(ours(pair, [prompt], **options), stock(pair, [prompt]))
    assert torch.equal(ours(pair, prompt_ids, **options), stock(pair, prompt_ids)), "a batch, padded on the left"


def test_the_draft_is_used(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """The draft is a copy of the target: far fewer calls of the target than tokens."""
    calls: list[int] = []
    draft = copy.deepcopy(pair.target)
    handle = pair.target.register_forward_hook(lambda *_: calls.append(1))
    try:
        text = ours(pair, prompt_ids[3:4], draft_model=draft, policy="fixed:5")
    finally:
        handle.remove()
    assert len(calls) < (text.shape[1] - len(prompt_ids[3])) / 3


def test_other_options_of_generate_are_honoured_greedily(pair: Pair, prompt_ids: list[list[int]]) -> None:
    cases: list[dict[str, Any]] = [
        {"repetition_penalty": 1.6}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 18}, {"eos_token_id": [EOS, 9, 30]},
        {"max_length": 14, "max_new_tokens": None}, {"max_new_tokens": 1}, {"bad_words_ids": [[9], [30, 31]]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [t for t in range(48) if t % 3 != batch]},
    ]  # fmt: skip
    # On a chain and a tree in turn: that processors see every branch is in `test_sampling.py`.
    for at, options in enumerate(cases):
        made = ours(pair, prompt_ids[4:7], tree=(None, "3,2")[at % 2], **options)
        assert torch.equal(made, stock(pair, prompt_ids[4:7], **options))


@pytest.mark.parametrize("tree", [None, "3,2"])
def test_a_grammar_is_not_asked_what_comes_after_the_end(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None
) -> None:
    """`generate` asks for no token after the end of a text: a trie of whole texts has none there."""
    prompt, told = prompt_ids[4], []

    def allowed(batch: int, ids: Tensor) -> list[int]:
        written = ids.tolist()[len(prompt) :]
        told.append(written)
        if EOS in written:
            return []  # which transformers takes for an error
        return [EOS] if len(written) == 5 else [t for t in range(48) if t != EOS]

    made = ours(pair, [prompt], prefix_allowed_tokens_fn=allowed, tree=tree, draft_model=copy.deepcopy(pair.target))
    assert max(map(len, told)) >= 5 and made[0, -1] == EOS
    assert torch.equal(made, stock(pair, [prompt], prefix_allowed_tokens_fn=allowed))


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def test_sampling_is_reproducible_by_torchs_seed_or_by_ours(pair: Pair, prompt_ids: list[list[int]]) -> None:
    def sample(manual: int, **more: Any) -> list[list[int]]:
        torch.manual_seed(manual)
        return ours(pair, prompt_ids[3:6], **{**SAMPLING, **more}).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1, seed=5) == sample(2, seed=5)
    assert sample(1, seed=5) != sample(1, seed=6)
    match = {"verification": "match"}
    assert sample(1, **match) == sample(1, policy="confidence:0.3", tree="3,2", **match), "the text is the key's"
    assert sample(1, verification="rejection") == sample(1, verification="rejection")


@pytest.mark.parametrize(
    ("temperature", "options", "shaping"),
    [
        (0.8, {}, Shaping()),
        (1.0, {}, Shaping()),
        (0.8, {"top_k": 5}, Shaping(top_k=5)),
        (1.0, {"top_p": 0.6}, Shaping(top_p=0.6)),
        (0.8, {"min_p": 0.2}, Shaping(min_p=0.2)),
        (1.0, {"top_k": 9, "top_p": 0.8, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 8},
         Shaping(9, 0.8, 0.0, 1.4, 2, 8)),
    ],
)  # fmt: skip
def test_sampling_options_are_those_of_the_loop(
    pair: Pair, prompt_ids: list[list[int]], temperature: float, options: dict[str, Any], shaping: Shaping
) -> None:
    """The same key gives the same text through `generate` and through the settings of the command line."""
    for prompt in prompt_ids[3:5]:
        made = ours(pair, [prompt], **{**SAMPLING, "temperature": temperature, **options}, seed=3)
        speculator = Speculator(pair, FixedLength(3), Settings(temperature, NEW, verification="auto", shaping=shaping))
        assert made[0, len(prompt) :].tolist() == list(speculator.generate(prompt, stream_key(3, "0")).tokens)


def test_sampled_text_is_plain_sampling_with_the_rows_key(pair: Pair, prompt_ids: list[list[int]]) -> None:
    made = ours(pair, prompt_ids, **SAMPLING, seed=4, tree="3,2")
    keys = [stream_key(4, str(i)) for i in range(len(prompt_ids))]
    longest = max(map(len, prompt_ids))
    for row, text in zip(made.tolist(), plain_texts(pair, prompt_ids, keys, NEW, 0.8).tokens, strict=True):
        assert row[longest:] == text + [0] * (made.shape[1] - longest - len(text))


def test_several_texts_of_one_prompt_differ(pair: Pair, prompt_ids: list[list[int]]) -> None:
    for seed in (None, 7):
        torch.manual_seed(0)
        made = ours(pair, prompt_ids[4:6], **SAMPLING, num_return_sequences=3, seed=seed)
        assert made.shape[0] == 6
        assert len({tuple(row) for row in made.tolist()}) == 6
        assert [row[: len(prompt_ids[5])] for row in made.tolist()] == [
            row for row in inputs(prompt_ids[4:6])["input_ids"].tolist() for _ in range(3)
        ]


def test_return_dict_in_generate(pair: Pair, prompt_ids: list[list[int]]) -> None:
    made = ours(pair, prompt_ids[:2], return_dict_in_generate=True)
    assert torch.equal(made.sequences, stock(pair, prompt_ids[:2]))
    told = made.statistics
    assert told["texts"] == 2 and told["drafted"] >= told["accepted"] > 0
    assert told["acceptance"][0][0] == 1 and 0.0 < told["acceptance"][0][1] <= 1.0


class Until(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_stopping_criteria_of_generate_are_asked(pair: Pair, prompt_ids: list[list[int]]) -> None:
    prompts = prompt_ids[3:6]
    for more in (2, 5, 8):
        criteria = StoppingCriteriaList([Until(max(map(len, prompts)) + more)])
        for tree in (None, "2,2"):
            made = ours(pair, prompts, stopping_criteria=criteria, tree=tree)
            assert torch.equal(made, stock(pair, prompts, stopping_criteria=criteria))
    text = stock(pair, prompts[:1])[0].tolist()
    mine = (EosTokenCriteria(text[-6]), MaxLengthCriteria(len(text) - 4))  # in the place of the configuration's
    for one in ([mine[0]], [mine[1]], [*mine]):
        made = ours(pair, prompts[:1], stopping_criteria=StoppingCriteriaList(one))
        assert torch.equal(made, stock(pair, prompts[:1], stopping_criteria=StoppingCriteriaList(one)))
        assert made.shape[1] < len(text)
    soon = ours(pair, prompts, max_time=1e-9)
    assert soon.shape[1] == max(map(len, prompts)) + 1


class Pieces(TextStreamer):
    """Keeps what would be printed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text, self.ends = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.ends += stream_end


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_gets_what_generate_would_give_it(
    pair: Pair, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[list[int]], skip_prompt: bool
) -> None:
    for prompt in prompt_ids[2:5]:
        mine, theirs = (Pieces(tokenizer, skip_prompt=skip_prompt) for _ in range(2))
        ours(pair, [prompt], text_streamer=mine, policy="fixed:4")
        stock(pair, [prompt], streamer=theirs)
        assert mine.text == theirs.text
        assert (mine.ends, theirs.ends) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": None}, r"expected draft_model= \(assistant_model= does not reach a callable\)"),
        ({"drafter": "lookup"}, "the drafter lookup takes no draft model; leave draft_model= or assistant_model= out"),
        ({"num_beams": 3}, "beam search is not speculative; expected num_beams=1"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True is not supported"),
        ({"verification": "matsch"}, "expected auto or one of match, rejection.*did you mean 'match'"),
        ({"tree": "x"}, "--tree: expected widths"),
        ({"drafter": "medusa"}, "--drafter: expected model, lookup"),
        ({"tree": "3,2", "verification": "block", "do_sample": True}, "block: expected a chain"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    pair: Pair, prompt_ids: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        ours(pair, prompt_ids[:1], **options)
    assert "\n" not in str(error.value)


def test_a_streamer_shows_one_text(pair: Pair, tokenizer: PreTrainedTokenizerFast, prompt_ids: list[list[int]]) -> None:
    with pytest.raises(InputError, match="a streamer shows one text; expected a batch of one"):
        ours(pair, prompt_ids[:2], text_streamer=Pieces(tokenizer))


# The stock loop with one of our policies.


@pytest.fixture(scope="module")
def endless(pair: Pair) -> Pair:
    """Neither model has an end of text: the stock loop lets the draft stop at its own."""
    models = [copy.deepcopy(model) for model in (pair.target, pair.draft)]
    for model in models:
        model.generation_config.eos_token_id = None
    return join(*models)


def drafts_of(draft: Any, run: Any) -> list[int]:
    """How many tokens each call of the assistant drafted while `run` ran."""
    lengths: list[int] = []
    before = draft.generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        out = before(*args, **kwargs)
        ids = out.sequences if hasattr(out, "sequences") else out
        lengths.append(ids.shape[1] - kwargs["input_ids"].shape[1])
        return out

    draft.generate = counting
    try:
        run()
    finally:
        draft.__dict__.pop("generate", None)
    return lengths


def assisted(pair: Pair, prompt: list[int], policy: StopPolicy) -> tuple[Tensor, list[int]]:
    """The text of assisted generation with a policy riding, and the lengths of its drafts."""
    out: list[Tensor] = []
    riding = PolicyStoppingCriteria(policy)

    def run() -> None:
        with riding.riding(pair.draft):
            out.append(stock(pair, [prompt], assistant_model=pair.draft))

    drafts = drafts_of(pair.draft, run)
    assert [drafted for drafted, _ in riding.rounds] == drafts[:-1]  # there is no one to tell of the last
    return out[0], drafts


@pytest.mark.parametrize(
    "policy", [FixedLength(3), Confidence(0.3, 6), Confidence(0.6), ByTokens(), ByPath()], ids=lambda p: p.name
)
def test_assisted_text_is_plain_and_its_drafts_are_the_policys(
    endless: Pair, prompt_ids: list[list[int]], policy: StopPolicy
) -> None:
    speculator = Speculator(endless, policy, Settings(0.0, NEW + 1))
    seen = set()
    for prompt in prompt_ids[4:6]:
        # The stock loop has no token of the target's before its first round: the rounds of both are the same after a
        # prompt whose last token is the target's own.
        begun = stock(endless, [prompt], max_new_tokens=3)[0].tolist()
        text, drafts = assisted(endless, begun, policy)
        assert torch.equal(text, stock(endless, [begun]))
        rounds = speculator.generate(begun[:-1]).rounds
        assert drafts == [r.drafted for r in rounds if r.drafted]
        seen |= set(drafts[:-3])
    assert len(seen) > 1 or policy.name.startswith("fixed")


class Unasked(StopPolicy):
    """Has nothing to say about one text: the contract's `keep`, which it does not implement, would raise."""

    name, max_depth, unasked = "unasked", 6, MappingProxyType({1: 2})


def test_a_policy_that_need_not_be_asked_about_one_text_is_not(endless: Pair, prompt_ids: list[list[int]]) -> None:
    policy = Unasked()
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    text, drafts = assisted(endless, begun, policy)
    assert torch.equal(text, stock(endless, [begun])) and set(drafts[:-2]) == {2}


class Watching(StopPolicy):
    """Notes the outcomes; drafts one token more from round to round."""

    name, max_depth = "watching", 5

    def __init__(self) -> None:
        self.outcomes: list[tuple[int, int, int]] = []

    def start(self, streams: int, keys: Array) -> State:
        return np.ones(streams, dtype=np.int64)

    def keep(self, step: Any, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < state)[:, None], state

    def observe(self, outcome: RoundOutcome, state: State) -> State:
        self.outcomes.append((int(outcome.drafted[0]), int(outcome.verified[0]), int(outcome.accepted[0])))
        return state % self.max_depth + 1


def test_a_riding_policy_hears_how_its_rounds_went(endless: Pair, prompt_ids: list[list[int]]) -> None:
    """The same outcomes as in our own loop; there is no one to tell of the last round."""
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    policy, same = Watching(), Watching()
    _, drafts = assisted(endless, begun, policy)
    Speculator(endless, same, Settings(0.0, NEW + 1)).generate(begun[:-1])
    assert [o[0] for o in policy.outcomes] == drafts[:-1]
    assert drafts[:6] == [1, 2, 3, 4, 5, 1]
    assert policy.outcomes == same.outcomes[: len(policy.outcomes)]
    assert any(0 < accepted < drafted for drafted, _, accepted in policy.outcomes)


def test_the_next_turn_of_a_conversation_is_another_text(endless: Pair, prompt_ids: list[list[int]]) -> None:
    riding = PolicyStoppingCriteria(Watching())
    with riding.riding(endless.draft):
        first = stock(endless, [prompt_ids[4]], assistant_model=endless.draft)[0].tolist()
        before = list(riding.rounds)
        stock(endless, [[*first, *prompt_ids[5]]], assistant_model=endless.draft)
    again = PolicyStoppingCriteria(Watching())
    with again.riding(endless.draft):
        stock(endless, [[*first, *prompt_ids[5]]], assistant_model=endless.draft)
    assert len(before) > 2 and riding.rounds == [*before, *again.rounds]


class Settling(Watching):
    """Settles at the root how much a round drafts: three tokens."""

    first = 0

    def keep(self, step: Any, state: State) -> tuple[Array, State]:
        state = np.full(len(step.alive), 3) if step.depth == 0 else state
        return super().keep(step, state)


def test_a_policy_that_settles_at_the_root_is_asked_there(endless: Pair, prompt_ids: list[list[int]]) -> None:
    begun = stock(endless, [prompt_ids[4]], max_new_tokens=3)[0].tolist()
    _, drafts = assisted(endless, begun, Settling())
    assert set(drafts[:-2]) == {3}


def test_riding_leaves_the_assistant_as_it_was(pair: Pair, prompt_ids: list[list[int]]) -> None:
    config, method = pair.draft.generation_config, pair.draft.generate
    before = config.to_dict()
    with pytest.raises(RuntimeError, match="inside"), PolicyStoppingCriteria("fixed:2").riding(pair.draft):
        stock(pair, prompt_ids[2:3], assistant_model=pair.draft)
        assert config.num_assistant_tokens == 2
        raise RuntimeError("inside")
    assert config.to_dict() == before
    assert pair.draft.generate == method
    assert "generate" not in vars(pair.draft)


@pytest.mark.parametrize(
    "policy",
    [
        TEST_POLICIES["from-anchor"],
        TEST_POLICIES["trimming"],
        TEST_POLICIES["selecting"],
        SelectingByToken(),
    ],
    ids=lambda p: p.name,
)
def test_a_policy_that_the_stock_loop_cannot_serve_is_refused(policy: StopPolicy) -> None:
    with pytest.raises(PolicyError, match=f"{policy.name}: (reads|leaves) .*stock assisted loop"):
        PolicyStoppingCriteria(policy)


class ReadsHidden(StopPolicy):
    name, hidden = "reads-hidden", ("draft_hidden",)


class ReadsNoise(StopPolicy):
    name, features = "reads-noise", ("noisy_margin",)


def test_hidden_states_and_noise_are_refused(pair: Pair) -> None:
    with pytest.raises(PolicyError, match="reads-hidden: reads draft_hidden, which the stock assisted loop has not"):
        PolicyStoppingCriteria(ReadsHidden())
    with pytest.raises(PolicyError, match="reads-noise: reads noisy_margin"):
        PolicyStoppingCriteria(ReadsNoise(), temperature=0.7)
    PolicyStoppingCriteria(ReadsNoise())


def test_a_learned_policy_with_history_rides(
    pair: Pair, traces: dict[float, Trace], full_profile: Profile, prompt_ids: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("riding") / "policy"
    profile = dataclasses.replace(full_profile, temperature=0.0)
    features = ["drawn_prob", "entropy", "mean_accepted", "last_accepted", "depth"]
    train(traces[0.0], profile, features=features, out=folder)
    policy = load_policy(folder)
    assert "mean_accepted" in policy.features
    for prompt in prompt_ids[2:5]:
        text, drafts = assisted(pair, prompt, policy)
        assert torch.equal(text, stock(pair, [prompt]))
        assert drafts
        assert max(drafts) <= policy.max_depth
