"""Rows of an engine's rounds: features and labels are those of the finished texts, none is lost or twice."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from simulated_engine import Engine, Request
from specstop.collect.engines.serving import (
    ANCHORS,
    PartWriter,
    RoundRecorder,
    engine_features,
    explored_by,
    import_parts,
)
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.live import LiveCollector, exploring
from specstop.collect.schema import Header, PromptTask, chain
from specstop.decode.drafters import find_drafter
from specstop.decode.engines.drafting import Drafting, Options
from specstop.decode.engines.vllm import Proposer
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.registry import load_policy

K, NEW = 4, 20


@pytest.fixture(scope="module")
def requests(endless_pair: Pair) -> list[Request]:
    chance = np.random.default_rng(4)
    prompts = [[int(t) for t in chance.integers(17, 48, n)] for n in chance.integers(2, 9, 8)]
    texts = plain_texts(endless_pair, prompts, [0] * len(prompts), NEW, 0.0).tokens
    return [Request(f"r{i}", p, list(t)) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]


def recorded(
    pair: Pair,
    requests: list[Request],
    policy: str,
    explore: float = 0.0,
    gentle: bool = False,
    seed: int = 0,
    made_by: Callable[..., RoundRecorder] | None = None,
) -> tuple[dict[str, Mapping[str, Any]], Engine]:
    """Return the rows of each finished request, and the engine that it ran in."""
    asked = load_policy(policy)
    asked = exploring(asked, explore, K) if explore else asked
    made: list[Drafting] = []

    def explored(rows: np.ndarray) -> np.ndarray:
        return explored_by(cast(Proposer, SimpleNamespace(drafting=made[0])), rows)

    recorder = (made_by or RoundRecorder)(3, K, 0.0, explored)
    options = Options(3, K, 128, pair.vocabulary)
    made.append(Drafting(find_drafter("model", pair), asked, options, observer=recorder))
    engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], 3, seed, gentle=gentle)

    def propose(sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        at = [i for i, new in enumerate(sampled) if new]
        drafts = made[0].propose([tokens[i, : lengths[i]] for i in at], [engine.names[i] for i in at])
        out: list[list[int]] = [[] for _ in sampled]
        for i, draft in zip(at, drafts, strict=True):
            out[i] = draft
        return out

    engine.run(propose)
    if isinstance(recorder, PartWriter):
        recorder.flush()
        return {}, engine
    texts = recorder.take()
    found = {}
    for at, request in enumerate(engine.finished):
        parts = [text for text in texts if text.name == request.name]
        rows = recorder.rows(parts, PromptTask(at, request.name, "", request.prompt), request.answer)
        assert rows is not None
        found[request.name] = rows
    return found, engine


def test_rounds_are_those_that_the_live_collector_records(endless_pair: Pair, requests: list[Request]) -> None:
    """Greedy, undisturbed: the same rounds of the same texts, features within float32 rounding, labels equal."""
    rows, _ = recorded(endless_pair, requests, "confidence:0.3", gentle=True)
    settings = Settings(0.0, NEW, K, ignore_eos=True)
    live = LiveCollector(endless_pair, load_policy("confidence:0.3"), settings)
    batch = [PromptTask(i, r.name, "", r.prompt) for i, r in enumerate(requests)]
    compared = 0
    for theirs in live.rows(batch):
        mine = rows[theirs["prompt_id"][0]]
        # The loop stops where the limit is; an engine drafts on and commits no more than the limit.
        inside = theirs["anchor"] + K + 1 <= NEW
        count = int(inside.sum())
        for name in ("anchor", "drawn", "sent", "tokens", "accepted_length", "decisions", "backlog", "committed"):
            assert np.array_equal(np.asarray(mine[name])[:count], np.asarray(theirs[name])[inside]), name
        for name in ("accepted", "observed"):
            assert np.array_equal(mine[name][:count], theirs[name][inside]), name
        for name in (*engine_features(0.0), "draft_prob", "anchor_token", "before_token"):
            assert np.allclose(mine[name][:count], theirs[name][inside], rtol=1e-4, atol=1e-5), name
        compared += count
    assert compared > 40


def test_labels_are_what_followed_and_no_round_is_lost_or_twice(endless_pair: Pair, requests: list[Request]) -> None:
    """Preempted, moved, aborted, trimmed: every draft that the engine was given has its row, once, with what came of it."""
    rounds = 0
    for seed in range(3):
        rows, engine = recorded(endless_pair, requests, "fixed:3", seed=seed)
        for request in engine.finished:
            mine = rows[request.name]
            given = [(context, draft, new) for context, draft, new in request.rounds if context > len(request.prompt)]
            assert mine["anchor"].tolist() == [context - len(request.prompt) for context, *_ in given]
            assert mine["committed"].tolist() == [len(new) for *_, new in given]
            for at, (context, draft, _) in enumerate(given):
                after = request.answer[context - len(request.prompt) :]
                agreed = next((j for j, t in enumerate(draft) if j >= len(after) or after[j] != t), len(draft))
                if draft:  # a request that came back from preemption has lost its draft
                    assert mine["tokens"][at][mine["sent"][at]].tolist() == draft
                    assert mine["accepted_length"][at] == agreed
            assert mine["cut"].tolist()[-1] and mine["text_tokens"][0] == NEW
            rounds += len(given)
    assert rounds > 60


def test_rounds_that_explore_are_marked(endless_pair: Pair, requests: list[Request]) -> None:
    rows, _ = recorded(endless_pair, requests, "fixed:1", explore=0.5, gentle=True)
    drawn = np.concatenate([one["drawn"].sum(1) for one in rows.values()])
    explored = np.concatenate([one["explored"] for one in rows.values()])
    assert set(drawn[explored]) == {K} and set(drawn[~explored]) == {1}
    assert 0.25 < explored.mean() < 0.75


def test_what_was_not_asked_for_is_not_kept(endless_pair: Pair) -> None:
    recorder = RoundRecorder(1, K, 0.7, lambda rows: np.zeros(len(rows), bool), keep=lambda number: number % 2 == 1)
    for number in range(4):
        recorder.on_begin(0, np.array([number, 1, 2]), f"r{number}")
    assert [text.name for text in recorder.take()] == ["r1", "r3"]
    assert not any(name.startswith("noisy_") for name in engine_features(0.7))


def header_of(pair: Pair, **more: Any) -> Header:
    told: dict[str, Any] = {
        "target": "t", "draft": "d", "pair": {}, "vocabulary": pair.vocabulary, "eos": (), "temperature": 0.0,
        "topology": chain(K), "features": engine_features(0.0), "anchor_features": ANCHORS, "max_new_tokens": 64, "seed": 0,
        "shards": 1, "prompts": 1, "prompts_hash": "", "collector": "live", "policy": "fixed:3",
    }  # fmt: skip
    return Header(**told | more)


def test_servers_write_the_same_rounds_and_a_trace_is_made_of_their_files(
    endless_pair: Pair, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, disturbed: together all rounds of each request, once, in the order of its text."""
    monkeypatch.setattr("specstop.collect.engines.serving.TEXTS", 3)
    parts, wanted = tmp_path / "parts", {}
    for seed, half in enumerate((requests[:4], requests[4:])):
        _, engine = recorded(
            endless_pair, half, "fixed:3", seed=seed,
            made_by=lambda *a: PartWriter(parts, header_of(endless_pair), (), 1.0, *a),
        )  # fmt: skip
        for request in engine.finished:
            given = [context - len(request.prompt) for context, *_ in request.rounds if context > len(request.prompt)]
            wanted[request.name] = given
    written = list(parts.iterdir())
    assert len(written) >= 2 and all(path.suffix == ".parquet" for path in written)
    rows = import_parts(parts, tmp_path / "trace").table(["prompt_id", "sequence", "anchor"]).to_pydict()
    found: dict[str, list[int]] = {}
    for name, anchor in zip(rows["prompt_id"], rows["anchor"], strict=True):
        found.setdefault(name, []).append(anchor)
    assert {name: found[name] for name in wanted} == wanted
    assert len(set(zip(rows["sequence"], rows["anchor"], strict=True))) == len(rows["anchor"])


def test_a_full_disk_ends_no_server_and_what_was_recorded_is_written_later(
    endless_pair: Pair, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = "specstop.collect.engines.serving"
    monkeypatch.setattr(f"{serving}.TEXTS", 2)
    monkeypatch.setattr(f"{serving}.IDLE", 1)

    tries: list[Path] = []

    def full(path: Path) -> Any:
        tries.append(path)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writers: list[PartWriter] = []

    def made_by(*given: Any) -> PartWriter:
        writers.append(PartWriter(tmp_path / "parts", header_of(endless_pair), (), 1.0, *given))
        return writers[0]

    with (
        monkeypatch.context() as patch,
        pytest.warns(SpecstopWarning, match="No space left on device"),
    ):
        patch.setattr(f"{serving}.staged", full)
        _, engine = recorded(endless_pair, requests[:4], "fixed:3", made_by=made_by)
    assert not list((tmp_path / "parts").iterdir())
    assert 1 < len(tries) <= 1 + len(writers[0]._chunks) // 2, "a full disk is not asked at every step"
    writers[0].flush()
    names = set(import_parts(tmp_path / "parts", tmp_path / "trace").table(["prompt_id"]).to_pydict()["prompt_id"])
    assert names == {request.name for request in engine.finished}


def test_a_request_that_comes_back_goes_on_as_another_text_and_loses_no_round(endless_pair: Pair) -> None:
    text = np.array([20, 21, 22, 23, 24, 25, 26, 27, 28, 29], dtype=np.int32)
    recorder = RoundRecorder(2, K, 0.0, lambda rows: np.zeros(len(rows), bool))
    drafting = Drafting(
        find_drafter("model", endless_pair), load_policy("fixed:2"), Options(2, K, 128, endless_pair.vocabulary),
        observer=recorder,
    )  # fmt: skip
    for length in (3, 4):
        drafting.propose([text[:length]], ["a"])
    for length in (3, 4, 5):
        drafting.propose([text[:length] + 10], ["b"])
    (first,) = recorder.take_ended(2)
    assert (first.name, [one.context for one in first.rounds]) == ("a", [3, 4])
    for length in (5, 6, 7):
        drafting.propose([text[:length]], ["a"])
    ended = {one.name: one for one in recorder.take_ended(-1)}
    parts = [(first, text[:4]), (ended["a"], text[:7])]
    rows = [
        recorder.rows([one], PromptTask(0, "a", "", one.tokens[: one.prompt]), one.tokens[one.prompt :])
        for one, _ in parts
    ]
    assert [one.tokens for one, _ in parts] == [known.tolist() for _, known in parts]
    anchors = [(one["anchor"] + one["prompt_tokens"]).tolist() for one in rows if one is not None]
    assert anchors == [[3], [4, 5, 6]]


def test_rounds_of_a_policy_that_was_trained_anew_stay_apart(
    endless_pair: Pair, requests: list[Request], tmp_path: Path
) -> None:
    """Its name is the old one's."""
    parts = tmp_path / "parts"
    for digest in ("a", "b"):
        header = header_of(endless_pair, facts={"digests": {"policy": digest}})
        recorded(
            endless_pair, requests[:1], "fixed:3", made_by=lambda *a, of=header: PartWriter(parts, of, (), 1.0, *a)
        )
    with pytest.raises(InputError, match="are of servers that were told different things"):
        import_parts(parts, tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "expected files that RecordingProposer wrote"),
        (lambda folder: (folder / "a.parquet").write_bytes(b"PAR1"), "a.parquet is no file of rounds"),
    ],
)
def test_a_folder_without_such_files_is_refused(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    make(tmp_path / "parts")
    with pytest.raises(InputError, match=message):
        import_vllm(tmp_path / "parts", tmp_path / "out")
    with pytest.raises(InputError, match=r"target, draft: .*parts names the models"):
        import_vllm(tmp_path / "parts", tmp_path / "out", target="mine")
    assert not (tmp_path / "out").exists()
