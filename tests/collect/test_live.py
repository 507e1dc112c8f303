"""The live collector and filtered sampling: rows are the loop's rounds and agree with dense ones; replay is the live loop."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, NEW
from contract_policies import DEPTH, TEST_POLICIES, ReadsDraftStates
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.schema import NO_TOKEN, TIMES
from specstop.collect.store import Trace, load_trace
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.run import decode
from specstop.decode.verify.conditions import warn_if_untrained
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.contract import Array, DraftStep, State, StopPolicy
from specstop.policies.errors import PolicyFailure, SpecstopWarning, TraceError
from specstop.policies.features import ANCHOR_FEATURES, HIDDEN_STATES
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.registry import load_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from trace_helpers import assert_replay_is_live, by_anchor, numpy_rows
from transformers.generation.logits_process import LogitsProcessor

FLOAT32, HALF = 2e-6, 2.0**-10
TREE = "3,2,1,1,1"
TOP_P = SamplingParams(top_p=0.8)
MANY = SamplingParams(min_p=0.3, repetition_penalty=1.4, no_repeat_ngram=2, min_new_tokens=9)


def run(pair: Pair, prompts: list[Prompt], out: Path, tree: str | None, temperature: float, **more: Any) -> Trace:
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "verification": "match"}
    return collect(pair, prompts, out, **{**options, **more})


@pytest.mark.parametrize(
    ("tree", "temperature", "sampling"),
    [
        (None, 0.7, SamplingParams()), (TREE, 0.0, SamplingParams()), (TREE, 0.7, SamplingParams()),
        (None, 0.0, SamplingParams(repetition_penalty=1.5, min_new_tokens=NEW)), (None, 0.7, SamplingParams(top_p=0.7)),
        (TREE, 0.7, SamplingParams(top_k=2)), (TREE, 1.0, MANY),
    ],
)  # fmt: skip
def test_dense_and_live_agree_at_the_anchors_that_both_have(pair, prompts, tmp_path, tree, temperature, sampling):
    options: dict[str, Any] = {"sampling": sampling, "hidden": tuple(HIDDEN_STATES)}
    dense = by_anchor(run(pair, prompts, tmp_path / "dense", tree, temperature, **options))
    policy = ReadsDraftStates() if tree is None else None
    live = by_anchor(
        run(pair, prompts, tmp_path / "live", tree, temperature, collector="live", policy=policy, **options)
    )
    candidates = accepted = 0
    for key, row in live.items():
        other, drawn, known = dense[key], row["drawn"], row["observed"]
        assert (row["tokens"] == other["tokens"])[drawn].all()
        assert (other["tokens"][row["tokens"] == NO_TOKEN] == NO_TOKEN).all()
        assert not (other["tokens"][drawn] == NO_TOKEN).any()
        assert row["text_tokens"] == other["text_tokens"]
        assert not row["draft_hidden"][~drawn].any()
        for name, near in {**dict.fromkeys(ANCHOR_FEATURES, FLOAT32), "target_hidden": HALF}.items():
            np.testing.assert_allclose(row[name], other[name], rtol=near, atol=near, err_msg=name)
        for name in set(other) - {*ANCHOR_FEATURES, "target_hidden", "target_prob", "overlap"}:
            if getattr(other[name], "dtype", None) in (np.float16, np.float32):
                near = HALF if name == "draft_hidden" else FLOAT32
                np.testing.assert_allclose(row[name][drawn], other[name][drawn], rtol=near, atol=near, err_msg=name)
        assert not (known & ~other["observed"]).any()
        assert (row["accepted"] == other["accepted"])[known].all()
        for name in ("target_prob", "overlap"):
            np.testing.assert_allclose(row[name][known], other[name][known], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
        if not row["cut"] and policy is None:
            assert (known == other["observed"]).all(), "a round that is not cut labels all that dense labels"
        candidates, accepted = candidates + int(drawn.sum()), accepted + int(row["accepted"].sum())
    assert candidates > 100 and accepted > 30


@pytest.mark.parametrize(
    ("name", "tree", "temperature"),
    [(name, *setup) for at, name in enumerate(("trimming", "adaptive", "selecting"))
     for setup in ((None, 0.7), (TREE, 0.7 * (at % 2)))],
)  # fmt: skip
def test_rows_are_the_rounds_of_the_loop_and_replay_as_the_run_that_they_record(
    pair, prompts, prompt_ids, profile, tmp_path, name, tree, temperature
):
    policy = TEST_POLICIES[name]
    trace = run(pair, prompts, tmp_path, tree, temperature, collector="live", policy=policy, profile=profile)
    log, rows = replay(trace_arrays(trace), policy, profile).log, by_anchor(trace)
    speculator = Speculator(pair, policy, Settings(temperature, NEW, DEPTH, tree=tree, verification="match"), profile)
    for s, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
        assert log[log[:, 0] == s, 1:].tolist() == [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        for r in rounds:
            row = rows.pop((s, r.anchor))
            assert [int(row["drawn"].sum()), int(row["sent"].sum())] == [r.drafted, r.verified]
            assert int((row["accepted"] & row["sent"]).sum()) == r.accepted
            assert all(row[column] == getattr(r, column) for column in ("committed", "decisions", "backlog"))
    assert rows == {} and torch.is_inference_mode_enabled() is False


def test_a_live_trace_refuses_a_policy_that_goes_elsewhere(pair, prompts, profile, tmp_path):
    arrays = trace_arrays(run(pair, prompts, tmp_path, TREE, 0.7, collector="live", policy=Confidence(0.6, DEPTH)))
    for policy, words in ((FixedLength(DEPTH), "confidence:0.6"), (Confidence(0.1, DEPTH), "no round|did not")):
        with pytest.raises(TraceError, match=words):
            replay(arrays, policy, profile)


@pytest.mark.parametrize(
    ("name", "tree"), [("confidence:0.4", None), ("trimming", TREE), ("selecting", TREE), ("fixed:1", None)]
)
def test_exploring_rounds_reach_the_full_depth_and_leave_the_others_and_the_text_as_they_are(
    pair, prompts, tmp_path, name, tree
):
    options: dict[str, Any] = {"collector": "live", "policy": TEST_POLICIES[name]}
    plain, mixed = (
        run(pair, prompts, tmp_path / str(explore), tree, 0.7, explore=explore, **options) for explore in (0.0, 0.3)
    )
    before, after = by_anchor(plain), by_anchor(mixed)
    rows = [row for row in after.values() if not row["cut"]]
    explored = [row for row in rows if row["explored"]]
    assert 0.15 < len(explored) / len(rows) < 0.45 and mixed.header.explore == 0.3
    assert all((row["drawn"] == row["sent"]).all() for row in explored)
    assert all(row["drawn"].all() or EOS in row["tokens"] for row in explored), (
        "a branch ends with EOS or at the bottom"
    )
    assert not all(row["sent"].all() for row in rows if not row["explored"])
    shared = [key for key in set(before) & set(after) if not after[key]["explored"]]
    assert len(shared) > 20
    # `selecting` decides by what it observed in earlier rounds, and `fixed` counts no decisions unless it explores.
    for key in shared if name in ("confidence:0.4", "trimming") else ():
        for column in ("drawn", "sent", "tokens", "committed", "decisions"):
            assert np.array_equal(before[key][column], after[key][column])
    lengths = [{key[0]: row["text_tokens"] for key, row in some.items()} for some in (before, after)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("verification", ["rejection", "rejection_replace", "block", "typical"])
def test_every_verification_can_be_recorded(pair, prompts, tmp_path, verification):
    tree = None if verification == "block" else TREE
    trace = run(pair, prompts[:4], tmp_path, tree, 0.7, collector="live", verification=verification)
    assert trace.header.verification == verification
    assert not [name for name in trace.header.features if name.startswith("noisy_")]
    rows = numpy_rows(trace)
    assert sum(int(row["accepted"].sum()) for row in rows) > 10
    for row in rows:
        for inner, outer in (("accepted", "observed"), ("observed", "sent"), ("sent", "drawn")):
            assert not (row[inner] & ~row[outer]).any()
        assert all(row[name] >= 0 for name in TIMES)
        assert row["seconds"] >= row["verify_s"] > 0


def test_labels_of_rejection_end_at_the_accepted_sibling(pair, prompts, tmp_path):
    trace, counts = run(pair, prompts, tmp_path, "4", 0.7, collector="live", verification="rejection"), set()
    for row in numpy_rows(trace):
        if not row["drawn"].all():
            continue
        tried = int(row["observed"].sum())
        assert row["observed"][:tried].all()
        assert row["accepted"].tolist() == [at == tried - 1 and bool(row["accepted"].any()) for at in range(4)]
        assert (row["target_prob"][row["draft_prob"] > 0] > 0).all(), "p is known of every node that was verified"
        counts.add(tried)
    assert len(counts) > 2


class Fails(Confidence):
    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        raise RuntimeError("now")


def test_a_policy_that_fails_ends_the_collection(pair, prompts, tmp_path):
    with pytest.warns(match="failed"), pytest.raises(PolicyFailure, match="now"):
        run(pair, prompts, tmp_path, None, 0.0, collector="live", policy=Fails(0.4, DEPTH), explore=0.3)


class Banning(LogitsProcessor):
    """Bans the token after the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


class ByNoise(StopPolicy):
    """Reads what the filters change: margins, the chance of the drawn token, its path; and trims by it."""

    name, trims, max_depth = "by-noise", True, DEPTH
    features = ("noisy_margin", "noisy_lead", "drawn_prob", "path_logprob", "mean_accepted")

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        margin, lead, chance, path, mean = np.moveaxis(step.features, -1, 0)
        return step.alive & (margin > 0.2) & (lead > -1.5) & (chance > 0.05) & (path > -5.0 - mean), state


POLICIES = (
    FixedLength(0),
    FixedLength(2),
    FixedLength(DEPTH),
    ByNoise(),
    *map(load_policy, ("confidence:0.2", "online:0.4")),
)


@pytest.mark.parametrize(
    ("sampling", "temperature", "tree"),
    [
        (SamplingParams(top_p=0.9, repetition_penalty=1.2), 0.7, None), (SamplingParams(top_k=20, min_p=0.05), 1.0, TREE),
        # Fewer tokens than siblings, and a logits processor that reads the text.
        (SamplingParams(top_k=2, processors=(Banning(),)), 0.7, "3,3,1,1,1"),
    ],
)  # fmt: skip
def test_replay_of_filtered_traces_is_the_live_loop(pair, prompts, profile, tmp_path, sampling, temperature, tree):
    settings = Settings(temperature, NEW, DEPTH, tree=tree, sampling=sampling, verification="match")
    assert len(assert_replay_is_live(pair, prompts[::2], POLICIES, settings, profile, tmp_path / "t")) > 100
    trace = load_trace(tmp_path / "t")
    assert trace.header.sampling == sampling.to_dict()
    arrays = trace_arrays(trace)
    missing = (arrays.tokens == NO_TOKEN).numpy()
    if sampling.processors:  # two tokens are left for three siblings
        assert missing[:, [2, 5]].all() and not missing[:, [0, 1, 3, 4]].any()
    assert not any(values.numpy()[missing].any() for values in arrays.columns.values() if values.dim() == 2)


def test_a_policy_is_warned_about_where_it_was_not_trained(pair, plain_pair, prompts, learned, full_profile, tmp_path):
    """The policy was trained without a filter at temperature 0.7 under match."""
    text, same = [prompts[0].text], Settings(0.7, 4, verification="match")

    def generate(**sampling: object) -> None:
        plain_pair.target.generate(
            torch.tensor([[20, 21]]), custom_generate=specstop_generate, draft_model=plain_pair.draft, max_new_tokens=4,
            do_sample=True, policy=learned, pad_token_id=0, temperature=0.7, **sampling,
        )  # fmt: skip

    filtered = run(pair, prompts, tmp_path / "t", None, 0.7, sampling=TOP_P)
    for call, words in (
        (lambda: decode(pair, text, learned, settings=replace(same, sampling=TOP_P)), "another filter"),
        (lambda: evaluate(filtered, full_profile, [learned]), "another filter"),
        (lambda: generate(top_k=7), "another filter"),
        (lambda: warn_if_untrained(learned, replace(same, temperature=1.0)), "temperature"),
        (lambda: warn_if_untrained(learned, replace(same, verification="rejection")), "verification"),
        (lambda: decode(pair, text, learned, settings=same, drafter="lookup"), "another pair"),
    ):
        with pytest.warns(SpecstopWarning, match=words):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        decode(pair, text, learned, settings=same)
        generate(top_k=0)
