"""Dense traces drawn given the text: what they hold, which options go together, and that replay takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.dense import DenseCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.collect.store import Trace, load_trace
from specstop.decode.drafters import with_drafter
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.policies import Confidence, FixedLength
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

FLOAT32 = 2e-6
OPTIONS: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 2}


@pytest.fixture(scope="module")
def drawn(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """A trace by verification, of two draws where any are made."""
    folder = tmp_path_factory.mktemp("drawn")
    return {
        name: collect(pair, prompts, folder / name, verification=name, draws=draws, **OPTIONS)
        for name, draws in (("rejection", 2), ("block", 2), ("point", 1))
    }


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "block"), ({"temperature": 0.0}, "match"), ({"tree": "2,1"}, "match"), ({"mix": 0.3, "depth": 1}, "match"),
        ({"collector": "live"}, "match"), ({"drafter": "lookup"}, "match"), ({"verification": "rejection"}, "rejection"),
    ],
)  # fmt: skip
def test_by_default_rounds_are_those_of_the_fastest_verification_that_can_be_replayed(
    pair: Pair, prompts: list[Prompt], options: dict[str, Any], mode: str
) -> None:
    chosen = with_drafter(pair, options.pop("drafter")) if "drafter" in options else pair
    assert plan_run(chosen, prompts, **{**OPTIONS, **options}).header.verification == mode


@pytest.mark.parametrize("name", ["rejection", "block", "point"])
def test_the_header_says_how_replay_is_exact(drawn: dict[str, Trace], traces: dict[float, Trace], name: str) -> None:
    header = drawn[name].header
    assert (header.verification, header.label) == (name, {"rejection": "ratio"}.get(name, name))
    assert (header.exactness, header.draws) == (("path", 1) if name == "point" else ("law", 2))
    assert not [feature for feature in header.features if feature.startswith("noisy_")]
    assert "law" in (drawn[name].folder / "README.md").read_text() or name == "point"
    assert traces[0.7].header.exactness == "path"
    again = type(header).from_json(header.to_json(), "here")
    assert again == header


def test_draws_are_sequences_of_one_text(drawn: dict[str, Trace], traces: dict[float, Trace]) -> None:
    plain = trace_arrays(traces[0.7])
    for name in ("rejection", "block"):
        arrays = trace_arrays(drawn[name], extra=("accept_chance", "next_chance"))
        assert arrays.prompt_ids == [prompt for prompt in plain.prompt_ids for _ in range(2)]
        assert arrays.text_tokens.tolist() == plain.text_tokens.repeat_interleave(2).tolist(), "the texts are the same"
        assert arrays.keys.tolist()[1] == stream_key(0, arrays.prompt_ids[1], 1)
        first, second = (arrays.subset(range(side, arrays.sequences, 2)) for side in (0, 1))
        assert (first.tokens != second.tokens).any() and (first.accepted != second.accepted).any()
        for chance in arrays.extra.values():
            assert float(chance.min()) >= 0.0 and float(chance.max()) <= 1.0
        depths = torch.arange(DEPTH)
        on_text = (arrays.accepted[:, None] >= depths) & ~arrays.cut[:, None]
        soft = arrays.extra["accept_chance"][on_text]
        hard = (arrays.accepted[:, None] > depths)[on_text]
        assert abs(float(soft.mean()) - float(hard.float().mean())) < 0.05
        assert not arrays.extra["accept_chance"][arrays.accepted[:, None] < depths].any()


def test_soft_labels_of_rejection_are_ratios(drawn: dict[str, Trace]) -> None:
    columns = ("accept_chance", "next_chance", "overlap", "draft_prob", "target_prob", "observed")
    arrays = trace_arrays(drawn["rejection"], extra=columns)
    known = arrays.extra["observed"]
    ratio = (arrays.extra["target_prob"] / arrays.extra["draft_prob"].clamp_min(1e-30)).clamp_max(1.0)
    np.testing.assert_allclose(arrays.extra["accept_chance"][known], ratio[known], rtol=1e-5)
    np.testing.assert_allclose(arrays.extra["next_chance"][known], arrays.extra["overlap"][known], rtol=1e-5)


def test_block_verification_accepts_more_and_any_policy_is_replayed(drawn: dict[str, Trace], profile: Profile) -> None:
    committed = {}
    for name, trace in drawn.items():
        made = [replay(trace_arrays(trace), policy, profile) for policy in (FixedLength(4), Confidence(0.3, DEPTH))]
        assert all(len(one) > 20 for one in made)
        committed[name] = made[0].block_efficiency
        limit = trace_arrays(trace).text_tokens
        assert made[0].tokens.tolist() == limit.tolist()
    assert committed["block"] > committed["rejection"] > committed["point"]


def test_point_rounds_are_those_of_the_live_loop(
    pair: Pair, prompt_ids: list[list[int]], drawn: dict[str, Trace], profile: Profile
) -> None:
    arrays, policy = trace_arrays(drawn["point"]), Confidence(0.3, DEPTH)
    log = replay(arrays, policy, profile).log
    settings = Settings(0.7, NEW, verification="point")
    for sequence, prompt in enumerate(prompt_ids):
        rounds = Speculator(pair, policy, settings).generate(prompt, stream_key(0, f"p{sequence}")).rounds
        live = [(r.anchor, r.drafted, r.verified, r.accepted) for r in rounds]
        assert live == [tuple(line[1:]) for line in log.tolist() if line[0] == sequence]


@pytest.mark.parametrize(("name", "tree"), [("rejection", "2,2"), ("rejection_replace", "2,1"), ("block", "chain:5")])
def test_rows_do_not_depend_on_the_chunks(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], name: str, tree: str
) -> None:
    work = [PromptTask(i, p.id, p.group, prompt_ids[i], stream_key(0, p.id)) for i, p in enumerate(prompts[:4])]
    whole, pieces = (
        DenseCollector(pair, Settings(0.7, NEW, tree=tree, verification=name), draws=2, **size).rows(work)
        for size in ({}, {"memory_bytes": 1})
    )
    assert [int(chunk["sequence"][0]) for chunk in whole] == list(range(8))
    for one, other in zip(whole, pieces, strict=True):
        for column, values in one.items():
            if getattr(values, "dtype", None) in (np.float32, np.float64):
                np.testing.assert_allclose(values, other[column], rtol=FLOAT32, atol=FLOAT32, err_msg=column)
            else:
                np.testing.assert_array_equal(values, other[column], err_msg=column)


def test_completions_need_no_noise(pair: Pair, prompts: list[Prompt], drawn: dict[str, Trace], tmp_path: Path) -> None:
    """Given as completions the texts bring the anchors that have labels all the way, drawn as they are from the start."""
    from specstop.decode.plain import plain_texts

    ids = [pair.tokenizer(p.text)["input_ids"] for p in prompts]  # type: ignore[misc]
    texts = plain_texts(pair, ids, [stream_key(0, p.id) for p in prompts], NEW + DEPTH, 0.7).tokens
    completions = {p.id: text for p, text in zip(prompts, texts, strict=True)}
    trace = collect(pair, prompts, tmp_path, verification="block", draws=2, completions=completions, **OPTIONS)
    assert (trace.header.texts, trace.header.exactness) == ("sampled", "law")
    one, other = trace_arrays(trace), trace_arrays(drawn["block"])
    for sequence in range(one.sequences):
        mine = one.subset([sequence])
        theirs = other.subset([sequence])
        rows = int(mine.rows[0])
        assert mine.tokens.tolist() == theirs.tokens[:rows].tolist()
        assert mine.accepted.tolist() == theirs.accepted[:rows].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "typical"}, "verification typical: expected a lossless one"),
        ({"verification": "block", "tree": "2,2"}, "verification block: expected a chain"),
        ({"verification": "match", "draws": 2}, "draws: expected 1 under match at temperature 0.7"),
        ({"verification": "block", "temperature": 0.0, "draws": 2}, "draws: expected 1 under match at temperature 0"),
        ({"verification": "block", "draws": 0}, "draws: expected a whole number"),
        ({"verification": "rejection", "off_text": "approximate"}, "off_text approximate: for `verification` block"),
        ({"verification": "block", "off_text": "none"}, "off_text: expected exact or approximate"),
        ({"collector": "live", "draws": 2}, "draws, off_text and memory: for the dense collector"),
        ({"verification": "rejection", "depth": 1, "mix": 0.2}, "mix: expected .* match verification"),
    ],
)
def test_options_that_do_not_go_together(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        collect(pair, prompts[:2], tmp_path / "t", **{**OPTIONS, "shards": 1, **options})
    assert not (tmp_path / "t").exists()


def test_at_temperature_0_every_verification_is_greedy_matching(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    options = {**OPTIONS, "temperature": 0.0, "shards": 1}
    header = collect(pair, prompts[:2], tmp_path, verification="block", **options).header
    assert (header.verification, header.label, header.exactness) == ("match", "match", "path")


def test_replay_refuses_what_the_live_loop_would(drawn: dict[str, Trace], profile: Profile) -> None:
    class Trims(Confidence):
        trims = True

    class Noisy(FixedLength):
        features = ("noisy_margin",)

    arrays = trace_arrays(drawn["rejection"])
    with pytest.raises(PolicyError, match="drawn_prob, which would bias"):
        replay(arrays, Trims(0.3, DEPTH), profile)
    with pytest.raises(PolicyError, match="noisy_margin"):
        replay(arrays, Noisy(2), profile)


def test_a_collection_of_draws_goes_on_where_it_was_stopped(
    pair: Pair, prompts: list[Prompt], drawn: dict[str, Trace], tmp_path: Path
) -> None:
    options = {**OPTIONS, "verification": "rejection", "draws": 2}
    made = collect(pair, prompts, tmp_path / "t", **options)
    (tmp_path / "t" / "index.json").unlink(missing_ok=True)
    for shard in sorted((tmp_path / "t" / "data").glob("*.parquet"))[1:]:
        shard.unlink()
    again = collect(pair, prompts, tmp_path / "t", resume=True, **options)
    assert load_trace(again.folder).row_count == made.row_count == drawn["rejection"].row_count


def test_what_carries_its_state_meets_a_text_once(drawn: dict[str, Trace], profile: Profile) -> None:
    from specstop.train.replay.run import _queues

    class Carrying(FixedLength):
        carries = True

    arrays = trace_arrays(drawn["block"])
    every = list(range(arrays.sequences))
    assert arrays.header.draws == 2
    assert _queues(arrays, Carrying(3)).tolist() == [every[::2], every[1::2]]
    assert _queues(arrays, FixedLength(3)).tolist() == [[s] for s in every]
    point = trace_arrays(drawn["point"])
    assert point.header.draws == 1
    assert _queues(point, Carrying(3)).tolist() == [list(range(point.sequences))]
    carried, plain = replay(arrays, Carrying(3), profile), replay(arrays, FixedLength(3), profile)
    assert carried.tokens.tolist() == plain.tokens.tolist() and len(carried) == len(plain)
