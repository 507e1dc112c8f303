"""What is chosen where drafters differ: nodes of trees whose depths come from one pass, and which of two drafters drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from small_drafters import small_network
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.drafters import TrainedDrafter, save_drafter, with_drafter
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import SpecstopWarning, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import TreeGain
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.drafters.choice import both, choose_sure, paired
from specstop.train.fit.run import train
from specstop.train.replay.bounds.static_tree import best_static_tree
from specstop.train.replay.log import play
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

TREE, DEPTH, NEW = "4,2,1", 3, 14
SIDES = ("low", "high")


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture(scope="module")
def twice(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that repeat themselves, so that suffixes are found."""
    return [dataclasses.replace(p, text=f"{p.text} {p.text}") for p in prompts[:6]]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_nodes_of_heads_are_chosen_live_as_replay_says(
    pair: Pair, twice: list[Prompt], profile: Profile, tmp_path: Path, kind: str
) -> None:
    """Trace, head, rule and folder as with a draft model; the best static tree beside it."""
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network(kind, output.shape[1], pair.vocabulary, output, DEPTH, 0.02)
    save_drafter(TrainedDrafter(kind, network, pair.fingerprint["target"]), tmp_path / kind)
    alone = with_drafter(pair, f"{kind}:{tmp_path / kind}")
    trace = collect(alone, twice, tmp_path / "trace", tree=TREE, temperature=0.0, max_new_tokens=NEW)
    costs = profile.with_decisions({"tree": 1e-5})
    made = train(trace, costs, rule="gain", out=tmp_path / "policy", passes=1)
    policy = load_policy_folder(tmp_path / "policy")
    assert isinstance(policy, TreeGain) and policy.metadata.pair == alone.fingerprint
    policy = policy.with_rule(dataclasses.replace(policy.rule, rate=0.5 * policy.rule.rate))  # so that it verifies more
    arrays = trace_arrays(trace)
    played = replay(arrays, policy, profile)
    speculator = Speculator(alone, policy, Settings(0.0, NEW, tree=TREE), profile)
    sizes = set()
    for sequence, prompt in enumerate(twice):
        ids = pair.tokenizer(prompt.text)["input_ids"]  # type: ignore[misc]
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        live = [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        assert played.log[played.log[:, 0] == sequence, 1:].tolist() == live
        sizes |= {(r.drafted, r.verified) for r in rounds}
    assert any(drafted > verified > 0 for drafted, verified in sizes), "some of what was drafted is left out"
    static, _ = best_static_tree(arrays, costs)
    assert made.metrics["held_out_static_tree_tokens_per_s"] > 0 and static.shape.nodes <= 20


@pytest.fixture(scope="module")
def traces(pair: Pair, twice: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[str, TraceArrays]:
    folder = tmp_path_factory.mktemp("two")

    def made(spec: str, name: str) -> TraceArrays:
        options = {"depth": DEPTH, "temperature": 0.7, "verification": "match", "max_new_tokens": NEW, "draft": spec}
        return trace_arrays(collect(with_drafter(pair, spec), twice, folder / name, **options))

    return {spec: made(spec, str(at)) for at, spec in enumerate(("suffix", "model", "suffix?confidence=0.4+model"))}


def test_a_trace_of_each_makes_the_trace_of_both(traces: dict[str, TraceArrays]) -> None:
    made, mine = both(traces["suffix"], traces["model"], 0.4)
    expected = traces["suffix?confidence=0.4+model"]
    assert 0.02 < float(mine.double().mean()) < 0.98
    drawable = expected.tokens >= 0  # live nothing is drawn below an end of text
    for name in ("tokens", "ends"):
        assert torch.equal(getattr(made, name)[drawable], getattr(expected, name)[drawable]), name
    for name in ("accepted", "cut"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert set(made.columns) == set(expected.columns)
    for name, values in expected.columns.items():
        there = slice(None) if values.dim() == 1 else drawable
        torch.testing.assert_close(made.columns[name][there], values[there], atol=1e-5, rtol=1e-5)


def cheap(profile: Profile) -> Profile:
    """The profile of a drafter whose steps take next to nothing."""
    sides = {s: dataclasses.replace(getattr(profile, s), draft_s=(1e-5, 1e-5)) for s in SIDES}
    return dataclasses.replace(profile, **sides)


def test_the_first_drafts_from_the_chance_on_that_gives_the_most_tokens_a_second(
    traces: dict[str, TraceArrays], profile: Profile
) -> None:
    first, other = traces["suffix"], traces["model"]
    free = cheap(profile)
    found = choose_sure(first, other, FixedLength(2), (free, profile), (0.0, 0.4, 1.0))
    assert found.first == pytest.approx(replay(first, FixedLength(2), free).rate)
    assert found.other == pytest.approx(replay(other, FixedLength(2), profile).rate)
    assert found.rate == max(found.other, *found.rates.values()) and found.rates[found.sure] == found.rate  # type: ignore[index]
    # By hand: every round in the time of its own drafter; what only the first one drafted is still to be read by the other.
    arrays, mine = both(first, other, 0.4)
    rounds = play(arrays, Confidence(0.0).limited(2), profile).rounds
    assert choose_sure(first, other, Confidence(0.0).limited(2), (free, profile), (0.4,)).rates[0.4] == pytest.approx(
        _rate(arrays, mine, rounds, free, profile)
    )
    costly = dataclasses.replace(profile, round_s=1.0)
    none = choose_sure(first, other, FixedLength(2), (costly, profile), (0.0,))
    assert none.sure is None and none.fastest == "other"
    assert choose_sure(first, other, FixedLength(2), (free, costly), (1.0,)).fastest == "first"
    assert dataclasses.replace(none, sure=0.4, rate=none.other + 1.0).fastest == "both"


def _rate(arrays: TraceArrays, mine: torch.Tensor, rounds: object, free: Profile, profile: Profile) -> float:
    seconds, tokens, before, unread = 0.0, 0, -1, 0
    names = ("sequence", "anchor", "context", "drafted", "verified", "backlog", "decisions")
    for *one, accepted in zip(*(getattr(rounds, n).tolist() for n in (*names, "accepted")), strict=True):
        sequence, anchor, context, drafted, verified, backlog, decisions = one
        if sequence != before:
            before, unread = sequence, context
            tokens += int(arrays.text_tokens[sequence])
            seconds += float(profile.prefill_seconds(arrays.prompt_tokens[sequence : sequence + 1].numpy())[0])
        by_first = bool(mine[int(arrays.offset[sequence]) + anchor - int(arrays.first_anchor[sequence])])
        values = torch.tensor(
            [[context], [drafted], [verified], [backlog if by_first else unread], [decisions]]
        ).numpy()
        price = profile.decision("confidence")
        seconds += float((free if by_first else profile).round_seconds(*values, price)[0])
        seconds += 0.0 if by_first or not drafted else float(free.first_draft_s(1, values[0])[0])  # asked in vain
        left = int(arrays.text_tokens[sequence]) - anchor
        committed = min(accepted + 1, left)
        unread = unread + committed if by_first or not drafted else committed - min(accepted, drafted - 1)
    return tokens / seconds


def test_traces_of_other_texts_are_refused(traces: dict[str, TraceArrays]) -> None:
    first, other = traces["suffix"], traces["model"]
    odd = dataclasses.replace(first, header=dataclasses.replace(first.header, temperature=0.0, seed=3))
    with pytest.raises(
        TraceError,
        match=r"dense traces of the same texts, but these differ: temperature \(0.0, [0-9.]+\), seed \(3, \d+\)",
    ):
        paired(odd, other)
    renamed = dataclasses.replace(first, prompt_ids=[f"{name}x" for name in first.prompt_ids])
    with pytest.raises(TraceError, match="these differ: prompts"):
        paired(renamed, other)


def test_texts_that_parted_are_left_out(traces: dict[str, TraceArrays], profile: Profile) -> None:
    first, other = traces["suffix"], traces["model"]
    assert paired(first, other) == (first, other)
    tokens = first.columns["anchor_token"].clone()
    tokens[int(first.offset[2])] += 1
    parted = dataclasses.replace(first, columns={**first.columns, "anchor_token": tokens})
    with pytest.warns(SpecstopWarning, match=r"1 of 6 texts differ between the two traces and are left out"):
        mine, theirs = paired(parted, other)
    kept = [name for at, name in enumerate(first.prompt_ids) if at != 2]
    assert mine.prompt_ids == theirs.prompt_ids == kept
    with pytest.warns(SpecstopWarning, match="1 of 6"):
        found = choose_sure(parted, other, FixedLength(2), (profile, profile), (0.4,))
    assert found.other == pytest.approx(replay(other.subset([0, 1, 3, 4, 5]), FixedLength(2), profile).rate)
    odd = dataclasses.replace(first, text_tokens=first.text_tokens + 1)
    with pytest.raises(TraceError, match="no text is in both"):
        paired(odd, other)
