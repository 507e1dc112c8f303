"""Rows of an engine's rounds: features and labels are those of the finished texts, none is lost or twice."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from simulated_engine import Engine, Request
from specstop.collect.engines import serving
from specstop.collect.engines.recorder import RoundRecorder, engine_features, engine_header, explored_by
from specstop.collect.engines.serving import PartWriter, import_parts
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.exploring import exploring
from specstop.collect.live import LiveCollector
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
Create = Callable[..., RoundRecorder]


@pytest.fixture(scope="module")
def requests(endless_pair: Pair) -> list[Request]:
    chance = np.random.default_rng(4)
    prompts = [[int(t) for t in chance.integers(17, 48, n)] for n in chance.integers(2, 9, 8)]
    texts = plain_texts(endless_pair, prompts, [0] * len(prompts), NEW, 0.0).tokens
    return [Request(f"r{i}", p, list(t)) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]


def serve(
    pair: Pair, requests: list[Request], policy: str, explore: float = 0.0, gentle: bool = False, seed: int = 0,
    create: Create = RoundRecorder,
) -> tuple[Any, Engine]:  # fmt: skip
    """Run requests in a simulated engine; return the recorder of its drafts and the engine."""
    chosen = load_policy(policy)
    chosen = exploring(chosen, explore, K) if explore else chosen
    proposer = cast(Proposer, SimpleNamespace(drafting=None))
    recorder = create(3, K, 0.0, lambda rows: explored_by(proposer, rows))
    options = Options(3, K, 128, pair.vocabulary)
    proposer.drafting = drafting = Drafting(find_drafter("model", pair), chosen, options, observer=recorder)
    engine = Engine([Request(r.name, r.prompt, r.answer) for r in requests], 3, seed, gentle=gentle)

    def propose(sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        at = [i for i, new in enumerate(sampled) if new]
        drafts = drafting.propose([tokens[i, : lengths[i]] for i in at], [engine.names[i] for i in at])
        out: list[list[int]] = [[] for _ in sampled]
        for i, draft in zip(at, drafts, strict=True):
            out[i] = draft
        return out

    engine.run(propose)
    return recorder, engine


def finished_rows(recorder: RoundRecorder, engine: Engine) -> dict[str, Mapping[str, Any]]:
    """Return the rows of each finished request."""
    texts, rows = recorder.take(), {}
    for at, request in enumerate(engine.finished):
        parts = [text for text in texts if text.name == request.name]
        columns = recorder.rows(parts, PromptTask(at, request.name, "", request.prompt), request.answer)
        assert columns is not None
        rows[request.name] = columns
    return rows


def test_rounds_are_those_that_the_live_collector_records(endless_pair: Pair, requests: list[Request]) -> None:
    """Greedy, undisturbed: the same rounds of the same texts, features within float32 rounding, labels equal."""
    rows = finished_rows(*serve(endless_pair, requests, "confidence:0.3", gentle=True))
    live = LiveCollector(endless_pair, load_policy("confidence:0.3"), Settings(0.0, NEW, K, ignore_eos=True))
    compared = 0
    for theirs in live.rows([PromptTask(i, r.name, "", r.prompt) for i, r in enumerate(requests)]):
        mine = rows[theirs["prompt_id"][0]]
        # The loop stops where the limit is; an engine drafts on and commits no more than the limit.
        inside = theirs["anchor"] + K + 1 <= NEW
        count = int(inside.sum())
        for name in (
            *("anchor", "drawn", "sent", "tokens", "accepted_length", "decisions", "backlog", "committed"),
            *("accepted", "observed"),
        ):
            assert np.array_equal(np.asarray(mine[name])[:count], np.asarray(theirs[name])[inside]), name
        for name in (*engine_features(0.0), "draft_prob", "anchor_token", "before_token"):
            assert np.allclose(mine[name][:count], theirs[name][inside], rtol=1e-4, atol=1e-5), name
        compared += count
    assert compared > 40
    assert not any(name.startswith("noisy_") for name in engine_features(0.7))


def test_labels_are_what_followed_and_no_round_is_lost_or_twice(endless_pair: Pair, requests: list[Request]) -> None:
    """Preempted, moved, aborted, trimmed: every draft that the engine was given has its row, once, with what came of it."""
    rounds = 0
    for seed in range(3):
        recorder, engine = serve(endless_pair, requests, "fixed:3", seed=seed)
        rows = finished_rows(recorder, engine)
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
            assert (mine["verify_s"] >= 0).all() and (mine["seconds"] >= mine["draft_s"])[mine["seconds"] > 0].all()
            rounds += len(given)
    assert rounds > 60


def test_rounds_that_explore_are_marked(endless_pair: Pair, requests: list[Request]) -> None:
    rows = finished_rows(*serve(endless_pair, requests, "fixed:1", explore=0.5, gentle=True))
    drawn = np.concatenate([one["drawn"].sum(1) for one in rows.values()])
    explored = np.concatenate([one["explored"] for one in rows.values()])
    assert set(drawn[explored]) == {K} and set(drawn[~explored]) == {1}
    assert 0.25 < explored.mean() < 0.75


@pytest.mark.parametrize(("share", "most", "least"), [(1.0, 400, 400), (0.25, 140, 60), (0.0, 0, 0)])
def test_a_share_of_the_requests_is_recorded(share: float, most: int, least: int) -> None:
    recorder = RoundRecorder(1, K, 0.7, lambda rows: np.zeros(len(rows), bool), share)
    for number in range(401):  # the last one has not ended
        recorder.on_begin(0, np.array([number, 1, 2]), f"r{number}")
    names = {text.name for text in recorder.take()}
    assert least <= len(names) <= most


def header_of(pair: Pair, **more: Any) -> Header:
    return Header(
        target="t", draft="d", pair={}, vocabulary=pair.vocabulary, eos=(), temperature=0.0, topology=chain(K),
        max_new_tokens=64, seed=0, shards=1, prompts=1, prompts_hash="", **engine_header(0.0, "fixed:3", 0.0) | more,
    )  # fmt: skip


def writing(folder: Path, header: Header) -> Create:
    return lambda *recorder: PartWriter(folder, header, (), *recorder)


def test_servers_write_the_same_rounds_and_a_trace_is_made_of_their_files(
    endless_pair: Pair, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, disturbed: together all rounds of each request, once, in the order of its text."""
    monkeypatch.setattr(serving, "TEXTS", 3)
    parts, expected = tmp_path / "parts", {}
    for seed, half in enumerate((requests[:4], requests[4:])):
        writer, engine = serve(endless_pair, half, "fixed:3", seed=seed, create=writing(parts, header_of(endless_pair)))
        writer.flush()
        for request in engine.finished:
            start = len(request.prompt)
            expected[request.name] = [context - start for context, *_ in request.rounds if context > start]
    files = list(parts.iterdir())
    assert len(files) >= 2 and all(path.suffix == ".parquet" for path in files)
    rows = import_parts(parts, tmp_path / "trace").table(["prompt_id", "sequence", "anchor"]).to_pydict()
    anchors: dict[str, list[int]] = {}
    for name, anchor in zip(rows["prompt_id"], rows["anchor"], strict=True):
        anchors.setdefault(name, []).append(anchor)
    assert {name: anchors[name] for name in expected} == expected
    assert len(set(zip(rows["sequence"], rows["anchor"], strict=True))) == len(rows["anchor"])


def test_what_is_recorded_is_written_when_no_step_follows(
    endless_pair: Pair, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "QUIET_S", 0.02)
    serve(endless_pair, requests[:2], "fixed:3", create=writing(tmp_path / "parts", header_of(endless_pair)))
    for _ in range(500):
        if list((tmp_path / "parts").glob("*.parquet")):
            break
        time.sleep(0.02)
    names = set(import_parts(tmp_path / "parts", tmp_path / "trace").table(["prompt_id"]).to_pydict()["prompt_id"])
    assert names <= {request.name for request in requests[:2]} and names


def test_a_full_disk_ends_no_server(
    endless_pair: Pair, requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writer, engine = serve(
        endless_pair, requests[:4], "fixed:3", create=writing(tmp_path / "parts", header_of(endless_pair))
    )
    with monkeypatch.context() as patch, pytest.warns(SpecstopWarning, match="No space left"):
        patch.setattr(serving, "staged", full)
        writer.flush()
    assert len(engine.finished) == 4 and not list((tmp_path / "parts").iterdir())


def test_a_request_that_comes_back_goes_on_as_another_text_and_loses_no_round(endless_pair: Pair) -> None:
    text = np.arange(20, 30, dtype=np.int32)
    recorder = RoundRecorder(2, K, 0.0, lambda rows: np.zeros(len(rows), bool))
    options = Options(2, K, 128, endless_pair.vocabulary)
    drafting = Drafting(find_drafter("model", endless_pair), load_policy("fixed:2"), options, observer=recorder)
    for length in (3, 4):
        drafting.propose([text[:length]], ["a"])
    for length in (3, 4, 5):
        drafting.propose([text[:length] + 10], ["b"])
    (first,) = recorder.take(2)
    assert (first.name, [one.context for one in first.rounds]) == ("a", [3, 4])
    for length in (5, 6, 7):
        drafting.propose([text[:length]], ["a"])
    later = {one.name: one for one in recorder.take()}["a"]
    anchors = []
    for part, length in ((first, 4), (later, 7)):
        assert part.tokens == text[:length].tolist()
        rows = recorder.rows([part], PromptTask(0, "a", "", part.tokens[: part.prompt]), part.tokens[part.prompt :])
        assert rows is not None
        anchors.append((rows["anchor"] + rows["prompt_tokens"]).tolist())
    assert anchors == [[3], [4, 5, 6]]


def test_rounds_of_a_policy_that_was_trained_again_stay_apart(
    endless_pair: Pair, requests: list[Request], tmp_path: Path
) -> None:
    """It has the name of the old one."""
    for digest in ("a", "b"):
        header = header_of(endless_pair, facts={"digests": {"policy": digest}})
        serve(endless_pair, requests[:1], "fixed:3", create=writing(tmp_path / "parts", header))[0].flush()
    with pytest.raises(InputError, match="differ in policy"):
        import_parts(tmp_path / "parts", tmp_path / "out")


@pytest.mark.parametrize("content", [None, b"PAR1"])
def test_a_folder_without_such_files_is_refused(content: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    if content is not None:
        (tmp_path / "parts" / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match="path: "):
        import_vllm(tmp_path / "parts", tmp_path / "out")
    with pytest.raises(InputError, match="target, draft: "):
        import_vllm(tmp_path / "parts", tmp_path / "out", target="mine")
    assert not (tmp_path / "out").exists()
