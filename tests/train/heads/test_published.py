"""The published heads through `train`, replay and the live loop: what they read, their rules, mixed texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_prompts
from contract_policies import DEPTH
from scipy.special import logit
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError, PolicyError, TraceError
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.run import Trained, train
from specstop.train.heads import head_class
from specstop.train.heads.calibration import auc
from specstop.train.heads.crossfit import Outputs, calibrate, labelled_rows
from specstop.train.heads.rows import OWN, SOFT_COLUMNS, Visits, fit_rows, mixed_arrays, mixed_rows
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay

NEW = 20
QUICK = {"epochs": 1}
KINDS = ("dynasd-soft", "dynasd-hard", "specdec", "specdec-published")


@pytest.fixture(scope="module")
def hidden(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace, Trace]:
    """Traces with hidden states to train on and to evaluate on, and a mixed one of the first prompts."""
    folder = tmp_path_factory.mktemp("hidden")
    both = ("draft_hidden", "target_hidden")
    options = {"temperature": 0.7, "verification": "match", "max_new_tokens": NEW, "shards": 2}
    fit, held = make_prompts(16, "fit", 21), make_prompts(6, "held", 22)
    return (
        collect(pair, fit, folder / "fit", depth=DEPTH, hidden=both, **options),
        collect(pair, held, folder / "held", depth=DEPTH, hidden=both, **options),
        collect(pair, fit, folder / "mixed", depth=1, mix=0.15, hidden=both[:1], **options),
    )


@pytest.fixture(scope="module")
def costs(profile: Profile) -> Profile:
    return profile.with_decisions(dict.fromkeys((*KINDS, "resnet"), 7.0e-5))


@pytest.fixture(scope="module")
def trained(
    hidden: tuple[Trace, Trace, Trace], costs: Profile, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Trained]:
    options, folder = {"params": QUICK, "cross_fit": False}, tmp_path_factory.mktemp("trained")
    return {kind: train(hidden[0], costs, head=kind, out=folder / kind, **options) for kind in (*KINDS, "resnet")}


READS = {
    "dynasd-soft": ((), ("draft_hidden",), "any"),
    "dynasd-hard": (HARD_FEATURES, (), "any"),
    "specdec": ((), ("draft_hidden",), "survival"),
    "specdec-published": ((), ("draft_hidden",), "survival"),
    "resnet": (None, ("draft_hidden", "target_hidden"), "derived"),
}


@pytest.mark.parametrize("kind", READS)
def test_a_published_head_reads_what_it_was_published_with_under_its_rule(
    trained: dict[str, Trained], kind: str
) -> None:
    features, hidden, rule = READS[kind]
    policy = trained[kind].policy
    assert (policy.hidden, policy.rule.kind) == (hidden, rule)
    assert features is None or policy.features == features
    published = kind in ("dynasd-soft", "dynasd-hard", "specdec-published")
    assert published is not head_class(kind).calibrated
    if published:
        assert isinstance(policy.rule, Threshold) and policy.rule.threshold in head_class(kind).thresholds
        assert (policy.accept.kind, policy.next.kind, policy.survival) == ("identity", "identity", None)


def test_the_published_grid_is_the_papers() -> None:
    """Stop above h in 0.1 .. 0.9 is to draft on at a survival of 1 - h at least; the released example has h = 0.7."""
    assert sorted(head_class("specdec-published").thresholds) == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert head_class("specdec-published").thresholds[0] == 0.3
    assert head_class("dynasd-soft").thresholds == head_class("dynasd-hard").thresholds == (0.4, 0.5)


@pytest.mark.parametrize("kind", READS)
def test_a_policy_on_hidden_states_decodes_as_it_replays(
    pair: Pair, hidden: tuple[Trace, Trace, Trace], costs: Profile, trained: dict[str, Trained], kind: str
) -> None:
    policy = trained[kind].policy
    prompts = make_prompts(6, "held", 22)
    ids = [pair.tokenizer(p.text)["input_ids"] for p in prompts]
    keys = [stream_key(0, p.id) for p in prompts]
    generations = [
        Speculator(pair, policy, Settings(0.7, NEW, verification="match")).generate(i, k)
        for i, k in zip(ids, keys, strict=True)
    ]
    assert [list(g.tokens) for g in generations] == plain_texts(pair, ids, keys, NEW, 0.7).tokens
    arrays = trace_arrays(hidden[1])
    log = replay(arrays, policy, costs).log.tolist()
    played = dict(zip([p.id for p in prompts], generations, strict=True))
    live = [
        [s, r.anchor, r.drafted, r.verified, r.accepted]
        for s, name in enumerate(arrays.prompt_ids)
        for r in played[name].rounds
    ]
    assert log == live and len(log) > 15


@pytest.mark.parametrize("kind", READS)
def test_its_folder_replays_the_same(
    hidden: tuple[Trace, Trace, Trace], costs: Profile, trained: dict[str, Trained], kind: str
) -> None:
    done = trained[kind]
    assert done.path is not None
    again = load_policy_folder(done.path)
    arrays = trace_arrays(hidden[1])
    assert torch.equal(replay(arrays, done.policy, costs).log, replay(arrays, again, costs).log)
    assert again.sizes == done.policy.sizes and again.metadata == done.policy.metadata


@pytest.mark.parametrize("rule", ["derived", "step", "survival", "any"])
def test_any_rule_can_be_asked_for(hidden: tuple[Trace, Trace, Trace], costs: Profile, rule: str) -> None:
    policy = train(hidden[0], costs, head="specdec", rule=rule, params=QUICK, cross_fit=False).policy
    assert policy.rule.kind == rule


def test_a_head_takes_the_hidden_states_that_are_asked_for(hidden: tuple[Trace, Trace, Trace], costs: Profile) -> None:
    options = {"head": "resnet", "params": QUICK, "cross_fit": False}
    policy = train(hidden[0], costs, hidden=["target_hidden"], features=["top1"], **options).policy
    assert (policy.hidden, policy.features) == (("target_hidden",), ("top1",))
    with pytest.raises(InputError, match="hidden: the head dynasd-soft reads draft_hidden, not target_hidden"):
        head_class("dynasd-soft").hidden_states([hidden[0]], ["target_hidden"])
    with pytest.raises(InputError, match="the head mlp reads no hidden state, not draft_hidden"):
        head_class("mlp").hidden_states([hidden[0]], ["draft_hidden"])
    with pytest.raises(PolicyError, match="did you mean 'draft_hidden'"):
        head_class("resnet").hidden_states([hidden[0]], ["draft_hiden"])


def test_a_trace_without_hidden_states_is_refused(sides: tuple[Trace, Trace], costs: Profile) -> None:
    for kind in ("dynasd-soft", "specdec", "specdec-published"):
        with pytest.raises(TraceError, match="no draft_hidden; collect it again with `hidden` draft"):
            train(sides[0], costs, head=kind)


# Mixed texts


@pytest.fixture(scope="module")
def mixed(hidden: tuple[Trace, Trace, Trace]) -> TraceArrays:
    return mixed_arrays(hidden[2], hidden[0], (), ("draft_hidden",))


def test_the_lagging_heads_rows_pair_each_own_token_with_the_state_after_it(mixed: TraceArrays) -> None:
    """By hand: the next place's state, where the draft read its own token there; the label of this place."""
    held = {mixed.clusters[0], mixed.clusters[3]}
    rows = mixed_rows(mixed, held, (), 1, soft=True)
    expected = []
    q, p = (mixed.extra[name] for name in SOFT_COLUMNS)
    for s, name in enumerate(mixed.clusters):
        start, count = int(mixed.offset[s]), int(mixed.rows[s])
        for row in range(start, start + count - 1):
            if name in held or bool(mixed.cut[row]) or not bool(mixed.extra[OWN][row + 1]):
                continue
            state = mixed.hidden_state("draft_hidden").at(torch.tensor([row + 1]), torch.tensor([0]))[0]
            expected.append((state, bool(mixed.accepted[row] >= 1), min(1.0, float(p[row, 0] / q[row, 0]))))
    assert len(rows) == len(expected) > 100
    assert torch.equal(rows.hidden["draft_hidden"], torch.stack([state for state, _, _ in expected]))
    assert rows.accepted.tolist() == [label for _, label, _ in expected]
    assert rows.chances is not None and rows.chances[:, 0].tolist() == pytest.approx(
        [ratio for _, _, ratio in expected]
    )
    assert bool(rows.drawn.all()) and not rows.followed_known.any()
    assert len(mixed_rows(mixed, set(), (), 1)) > len(rows)


def test_a_head_without_lag_reads_the_place_itself(mixed: TraceArrays) -> None:
    rows = mixed_rows(mixed, set(), (), 0)
    every = (~mixed.cut).nonzero()[:, 0]
    whole = fit_rows(mixed, (), Visits(every, torch.zeros(len(every), 4)), ("draft_hidden",))
    assert torch.equal(rows.hidden["draft_hidden"], whole.hidden["draft_hidden"])
    assert torch.equal(rows.accepted, whole.accepted) and set(rows.depth.tolist()) == {0, 1}


@pytest.mark.parametrize("kind", ["specdec", "specdec-published", "dynasd-soft"])
def test_heads_are_fitted_on_mixed_texts_and_settled_on_plain_ones(
    hidden: tuple[Trace, Trace, Trace], costs: Profile, trained: dict[str, Trained], kind: str
) -> None:
    done = train(hidden[0], costs, head=kind, params=QUICK, cross_fit=False, mixed=hidden[2])
    assert done.policy.max_depth == DEPTH
    mine, plain = (p.head.tensors() for p in (done.policy, trained[kind].policy))
    assert any(not np.array_equal(mine[name], plain[name]) for name in mine)


def test_what_is_no_mixed_trace_is_refused(hidden: tuple[Trace, Trace, Trace], costs: Profile) -> None:
    with pytest.raises(TraceError, match=r"mixed: .* is no mixed trace; collect one with `mix` 0.15 `depth` 1"):
        train(hidden[0], costs, head="specdec", mixed=hidden[1])


# Calibration of a head that lags


def test_the_calibrator_of_a_lagging_head_is_fitted_on_the_token_before() -> None:
    """The logit at depth j is the truth of x_{j-1}; taken for that of x_j it would be noise."""
    generator = np.random.default_rng(0)
    count, depth = 4000, 4
    chance = generator.random((count, depth))
    accepted = (generator.random((count, depth)) < chance).cumprod(1)
    logits = np.zeros((count, depth + 1, 2))
    logits[:, 2:, 0] = 2.0 * logit(chance[:, :-1].clip(1e-4, 1 - 1e-4))  # twice too sure
    outputs = Outputs(logits, accepted.sum(1), np.arange(count) % 4, np.zeros(count), np.ones((count, depth), bool), 1)
    done = calibrate(outputs)
    found = done.accept(logits[:, 2, 0])
    assert float(np.abs(found - chance[:, 0]).mean()) < 0.02
    rows, as_if_not = (labelled_rows(of)[0] for of in (outputs, replace(outputs, lag=0)))
    assert auc(rows.logits, rows.labels) > 0.7  # type: ignore[operator]
    assert auc(as_if_not.logits, as_if_not.labels) < 0.6  # type: ignore[operator]


def test_outputs_are_left_as_they_are_where_they_were_published_so() -> None:
    generator = np.random.default_rng(1)
    logits = generator.standard_normal((500, 4, 2))
    outputs = Outputs(logits, generator.integers(0, 4, 500), np.arange(500) % 4, np.zeros(500), np.ones((500, 3), bool))
    done = calibrate(outputs, unchanged=True)
    assert (done.accept.kind, done.next.kind) == ("identity", "identity")
    assert done.survival is None
