"""Completions and mixed texts: rows that agree with what the plain way records, where it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EOS
from reference_features import Rows, compute
from specstop.collect.completions import agreeing_anchors
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import gumbel, stream_key
from specstop.policies.errors import InputError, TraceError
from specstop.policies.features import CHAIN_FEATURES, HISTORY_FEATURES
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.fit.run import train
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from trace_rows import numpy_rows

FLOAT32 = 2e-6
DEPTH, NEW = 3, 20


@pytest.fixture(scope="module")
def texts(pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]]) -> list[list[int]]:
    keys = [stream_key(0, p.id) for p in prompts]
    return plain_texts(pair, prompt_ids, keys, NEW + DEPTH, 0.7).tokens


def test_of_greedy_answers_the_anchors_with_the_targets_own_continuation_are_kept(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    """The target's own text, one token of it changed: the rows elsewhere are the dense ones."""
    assert pair.tokenizer is not None
    texts = plain_texts(pair, prompt_ids, [0] * len(prompts), NEW + DEPTH).tokens
    changed = {}
    for prompt, text in zip(prompts, texts, strict=True):
        other = list(text)
        if len(text) > 9:
            other[8] = 7 + (other[8] == 7)
        changed[prompt.id] = pair.tokenizer.decode(other)
    options = {"depth": DEPTH, "max_new_tokens": NEW}
    dense = collect(pair, prompts, tmp_path / "dense", **options)
    own = {(int(r["sequence"]), int(r["anchor"])): r for r in numpy_rows(dense)}
    given = collect(pair, prompts, tmp_path / "given", completions=changed, **options)
    assert given.header.texts == "completions"
    before, after = set(), set()
    for row in numpy_rows(given):
        s, anchor = int(row["sequence"]), int(row["anchor"])
        assert not (5 < anchor <= 8 and len(texts[s]) > 9), "the changed token is no continuation of the target's"
        if anchor > 8:
            after.add((s, anchor))
            continue
        before.add((s, anchor))
        for name in (*CHAIN_FEATURES, "tokens", "accepted", "observed", "target_prob", "overlap", "anchor_entropy"):
            np.testing.assert_allclose(row[name], own[s, anchor][name], rtol=FLOAT32, atol=FLOAT32, err_msg=name)
    assert before == {key for key in own if key[1] <= 5 or (len(texts[key[0]]) <= 9 and key in before)}
    assert len(before) > 25


@pytest.mark.parametrize(
    ("text", "own", "ended", "anchors"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], False, [1, 2, 3, 4]),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], False, [1, 4]),
        ([1, 2, 3, 4, 5, EOS], [9, 2, 3, 4, 5, EOS], True, [1, 2, 3, 4, 5]),
        ([1, 2, 3, 4, 5, EOS], [1, 2, 3, 4, 5, 6], True, [1, 2, 3]),
    ],
)
def test_anchors_look_two_tokens_ahead(text: list[int], own: list[int], ended: bool, anchors: list[int]) -> None:
    assert agreeing_anchors(text, own, len(text), 2, ended) == anchors


def test_a_trace_of_completions_is_not_replayed_where_anchors_miss(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path
) -> None:
    assert pair.tokenizer is not None
    texts = plain_texts(pair, prompt_ids, [0] * len(prompts), NEW + DEPTH).tokens
    completions = {
        p.id: pair.tokenizer.decode([*t[:4], 7 + (t[4] == 7) if len(t) > 4 else EOS, *t[5:]])
        for p, t in zip(prompts, texts, strict=True)
    }
    trace = collect(pair, prompts, tmp_path / "a", depth=DEPTH, max_new_tokens=NEW, completions=completions)
    with pytest.raises(TraceError, match="texts of completions"):
        replay(trace_arrays(trace), FixedLength(2), profile)
    with pytest.raises(InputError, match="completions"):
        collect(pair, prompts, tmp_path / "b", depth=DEPTH, max_new_tokens=NEW, completions={"p0": "w7"})
    assert not (tmp_path / "b").exists(), "it is told before any work"
    assert trace_arrays(trace).only_positions
    with pytest.raises(TraceError, match="has not every position of its texts, so that no text can be replayed to"):
        train(trace, profile)
    made = train(trace, profile, rule="survival", threshold=0.4)
    assert not set(made.policy.features) & set(HISTORY_FEATURES), "of rounds before nothing is known"
    assert made.metrics["rows"] > 0 and "held_out_tokens_per_s" not in made.metrics


def test_mixed_rows_are_those_of_a_loop_over_positions(
    plain_pair: Pair,
    prompts: list[Prompt],
    prompt_ids: list[list[int]],
    texts: list[list[int]],
    profile: Profile,
    tmp_path: Path,
) -> None:
    """Labels are those of the text; features those of the draft after what `mixed` says that it read."""
    options = {"depth": 1, "temperature": 0.7, "verification": "match", "max_new_tokens": NEW}
    plain = numpy_rows(collect(plain_pair, prompts, tmp_path / "plain", **options))
    trace = collect(plain_pair, prompts, tmp_path / "mixed", mix=0.3, **options)
    rows = numpy_rows(trace)
    key = lambda row: (int(row["sequence"]), int(row["anchor"]))  # noqa: E731
    assert sorted(map(key, plain)) == sorted(map(key, rows))
    own = {key(row): row for row in plain}
    for row in rows:
        for name in ("tokens", "accepted", "observed", "target_prob", "draft_prob", "overlap", "accepted_length"):
            assert np.array_equal(row[name], own[key(row)][name]), name
    by_key = {key(row): row for row in rows}
    for s, prompt in enumerate(prompt_ids):
        read = [*prompt, texts[s][0]]
        for anchor in range(1, sum(k[0] == s for k in by_key) + 1):
            row = by_key[s, anchor]
            if anchor > 1:
                last = by_key[s, anchor - 1]
                read.append(int(last["tokens"][0]) if row["mixed"] else texts[s][anchor - 1])
            with torch.no_grad():
                logits = plain_pair.draft(torch.tensor([read])).logits[0, -1:]
            noise = gumbel(
                stream_key(0, prompts[s].id), torch.tensor([len(read)]), plain_pair.vocabulary, torch.float64
            )
            scores = torch.log_softmax(logits / 0.7, -1) + noise
            token = torch.tensor([int(row["tokens"][0])])
            expected = Rows(
                logits, 0.7, scores, token, torch.zeros(1, dtype=torch.float64), 1, None, 0 * token, 0 * token + 1
            )
            np.testing.assert_allclose(
                [row[n][0] for n in CHAIN_FEATURES], compute(CHAIN_FEATURES, expected)[0], rtol=FLOAT32, atol=FLOAT32
            )
    share = np.mean([bool(row["mixed"]) for row in rows if row["anchor"] > 1])
    assert 0.55 < share < 0.85
    with pytest.raises(TraceError, match="mix"):
        replay(trace_arrays(trace), FixedLength(1), profile)


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an older trace"])
def test_answers_without_a_row_are_refused_and_leave_what_was_there(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, there: str
) -> None:
    out = tmp_path / "deep" / "out"
    if there == "an empty folder":
        out.mkdir(parents=True)
    elif there == "an older trace":
        collect(pair, prompts[:1], out, depth=DEPTH, max_new_tokens=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    answers = {p.id: "w5" for p in prompts}  # too short for an anchor
    with pytest.raises(TraceError, match="prompts: there is no row, so nothing is kept"):
        collect(pair, prompts, out, depth=DEPTH, max_new_tokens=NEW, completions=answers, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
