"""Acceptance records of engines and tables of accepted lengths: fixtures of each format, round trips, and refusals."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from specstop.collect.engines.records import import_records
from specstop.collect.store import Trace, check_trace, column_array
from specstop.collect.table import import_table
from specstop.policies.errors import InputError, TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.policies.routing import ThresholdRoute
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds

Steps = list[int]
TEXTS: list[Steps] = [[0, 3, 1, 2, 3, 0, 0, 1], [2, 2, 0, 3, 1, 1, 0, 0, 3]]
"""Accepted tokens of each step of two texts that drafted three."""


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def vllm(texts: list[Steps]) -> list[Any]:
    return [
        {"id": f"r{at}", "usage": {"prompt_tokens": 9, "completion_tokens": 2 + sum(steps) + len(steps)},
         "metrics": {"speculative_decoding": {"num_spec_tokens": 3, "per_step_accepted": steps}}}
        for at, steps in enumerate(texts)
    ]  # fmt: skip


def sglang(texts: list[Steps]) -> list[Any]:
    return [
        {"text": "...", "meta_info": {
            "id": f"r{at}", "prompt_tokens": 9, "completion_tokens": 1 + sum(steps) + len(steps),
            "spec_verify_ct": len(steps),
            "spec_accept_rate": sum(steps) / 3 / len(steps), "spec_num_correct_drafts": sum(steps),
            "spec_num_proposed_drafts": 3 * len(steps),
            "spec_correct_drafts_histogram": [steps.count(n) for n in range(max(steps) + 1)]}}
        for at, steps in enumerate(texts)
    ]  # fmt: skip


def llama_log(texts: list[Steps]) -> list[Any]:
    rows = ["0.01 I srv  load_model: loaded"]
    for steps in texts:
        shares = ", ".join(f"{np.mean([n >= k for n in steps]):.3f}" for k in (1, 2, 3))
        rows.append(
            f"0.06 I slot print_timing: id  1 | task 0 | draft acceptance = {sum(steps) / 3 / len(steps):.5f} "
            f"( {sum(steps):4} accepted / {3 * len(steps):4} generated), mean acceptance length = {1 + np.mean(steps):.2f}, "
            f"acceptance rate per position = ({shares})"
        )
    return rows


def llama_timings(texts: list[Steps]) -> list[Any]:
    return [
        {"timings": {"prompt_n": 9, "prompt_ms": 80.0, "predicted_n": 1 + sum(steps) + len(steps), "predicted_ms": 900.0,
                     "draft_n": len(steps), "draft_n_accepted": sum(steps)}}
        for steps in ([min(n, 1) for n in text] for text in texts)
    ]  # fmt: skip


Writer = Callable[[Path, list[Steps]], Path]


def lab(path: Path, texts: list[Steps]) -> Path:
    """Write both files of a run of inference-lab; the rows of the second one are in another order."""
    path.mkdir()
    keys = [
        {"model": "m", "speculator": "s", "config": "c", "category": "code", "prompt_idx": at, "turn": 0, "round_idx": number}
        for at, steps in enumerate(texts) for number in range(len(steps))
    ]  # fmt: skip
    accepted = [n for steps in texts for n in steps]
    masks = [{"accept": n, **{f"acc{k}": int(k < n) for k in range(3)}, "acc3": None} for n in accepted]
    confidences = [{f"conf{k}": 0.9 if k < n else 0.2 for k in range(3)} for n in accepted]
    for name, rows in (("acceptance", masks), ("speculator", confidences)):
        joined = [{**key, **row} for key, row in zip(keys, rows, strict=True)]
        order = joined[::-1] if name == "speculator" else joined
        parquet.write_table(pa.Table.from_pylist(order), path / f"{name}.parquet")
    return path


WRITERS: dict[str, Writer] = {
    "vllm": lambda path, texts: lines(path.with_suffix(".jsonl"), vllm(texts)),
    "sglang": lambda path, texts: lines(path.with_suffix(".jsonl"), sglang(texts)),
    "llama.cpp": lambda path, texts: lines(path.with_suffix(".log"), llama_log(texts)),
    "llama.cpp timings": lambda path, texts: lines(path.with_suffix(".jsonl"), llama_timings(texts)),
    "inference-lab": lab,
}


def imported(path: Path, engine: str, texts: list[Steps]) -> Trace:
    return import_records(WRITERS[engine](path / "records", texts), path / "out", target="t", draft="d")


@pytest.mark.parametrize("engine", WRITERS)
def test_records_of_every_engine_give_the_same_rounds(tmp_path: Path, engine: str, profile: Profile) -> None:
    """Lengths up to the recorded one are evaluated, longer ones are not."""
    most = 1 if engine == "llama.cpp timings" else 3
    trace = imported(tmp_path, engine, TEXTS)
    rows = trace.rows.with_format("numpy")
    lengths: dict[str, list[int]] = {}
    for name, length in zip(rows["prompt_id"][:], rows["accepted_length"][:].tolist(), strict=True):
        lengths.setdefault(str(name), []).append(length)
    expected = [Counter(min(n, most) for n in steps) for steps in TEXTS]
    assert [Counter(one) for one in lengths.values()] == expected
    assert trace.header.policy == engine.partition(" ")[0] and trace.header.depth == most
    arrays, is_ordered = trace_arrays(trace, extra=ROUND_COLUMNS), engine in ("vllm", "inference-lab")
    known = [n for steps in TEXTS for n in (steps[:-1] if is_ordered else steps)]
    for k in range(most + 1):
        values = evaluate_rounds(arrays, FixedLength(k), profile)
        assert float(values.committed.mean()) == pytest.approx(1 + np.minimum(known, k).mean())
    with pytest.raises(TraceError):
        evaluate_rounds(arrays, FixedLength(most + 1), profile)


def test_confidences_are_features(tmp_path: Path, profile: Profile) -> None:
    arrays = trace_arrays(imported(tmp_path, "inference-lab", TEXTS), extra=ROUND_COLUMNS)
    values = evaluate_rounds(arrays, Confidence(0.5, 3), profile)
    known = np.array([n for steps in TEXTS for n in steps[:-1]])
    assert float(values.committed.mean()) == pytest.approx(1 + known.mean())
    assert sorted(values.drafted.tolist()) == sorted(np.minimum(known + 1, 3).tolist())


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_a_log_are_recovered_from_rounded_shares(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    steps = np.minimum(generator.geometric(0.4, int(generator.integers(20, 400))) - 1, 3).tolist()
    trace = imported(tmp_path, "llama.cpp", [steps])
    assert Counter(trace.rows["accepted_length"][:]) == Counter(steps)


def edited(rows: list[Any], *path: Any, value: Any = ...) -> list[Any]:
    """Return rows with another value at a path in the second one; `...` removes it."""
    rows = json.loads(json.dumps(rows))
    inner = rows[1]
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return rows


SPEC, INFO = ("metrics", "speculative_decoding"), ("meta_info",)
MALFORMED: dict[str, list[list[Any]]] = {
    "vllm": [
        edited(vllm(TEXTS), "metrics"), edited(vllm(TEXTS), *SPEC, "per_step_accepted", value=[4]),
        edited(vllm(TEXTS), *SPEC, "per_step_accepted", value=[-1]), edited(vllm(TEXTS), *SPEC, "per_step_accepted", value=3),
        edited(vllm(TEXTS), *SPEC, "per_step_accepted", value=["a"]), edited(vllm(TEXTS), *SPEC, "num_spec_tokens"),
        edited(vllm(TEXTS), *SPEC, "per_step_drafted", value=[3]), edited(vllm(TEXTS), *SPEC, "num_spec_tokens", value=10**9),
        edited(vllm(TEXTS), "usage", value={"completion_tokens": 10**12}), [vllm(TEXTS)[0], "{"], [vllm(TEXTS)[0], "[]"],
    ],
    "sglang": [
        edited(sglang(TEXTS), "meta_info", value=None), edited(sglang(TEXTS), *INFO, "spec_verify_ct"),
        edited(sglang(TEXTS), *INFO, "spec_verify_ct", value=0), edited(sglang(TEXTS), *INFO, "spec_verify_ct", value=8.5),
        edited(sglang(TEXTS), *INFO, "spec_correct_drafts_histogram"),
        edited(sglang(TEXTS), *INFO, "spec_correct_drafts_histogram", value=[-1, 10]),
        edited(sglang(TEXTS), *INFO, "spec_correct_drafts_histogram", value=[1, 1]),
        edited(sglang(TEXTS), *INFO, "spec_correct_drafts_histogram", value=[0, 0, 0, 0, 9]),
        edited(sglang(TEXTS), *INFO, "spec_num_proposed_drafts"),
        edited(sglang(TEXTS), *INFO, "spec_num_proposed_drafts", value=26), [sglang(TEXTS)[0], "text"],
    ],
    "llama.cpp timings": [
        edited(llama_timings(TEXTS), "timings", value=3), edited(llama_timings(TEXTS), "timings", "draft_n"),
        edited(llama_timings(TEXTS), "timings", "draft_n_accepted"), edited(llama_timings(TEXTS), "timings", "predicted_n"),
        *(edited(llama_timings(TEXTS), "timings", "draft_n", value=value) for value in (-1, 2, 27, 0.5, "9", True, None)),
    ],
    "llama.cpp": [
        *([llama_log(TEXTS)[1].replace(before, after)] for before, after in (
            ("(0.625,", "(0.6,"), ("(0.625", "(1.625"), ("(0.625", "(-0.625"), ("(0.625", "(nan"), ("(0.625", "(x"),
            ("(0.625", "(0.125"), ("10 accepted", "11 accepted"), ("24 generated", "18 generated"),
            ("24 generated", "25 generated"), ("24 generated", "9 generated"),
            ("acceptance rate per position", "acceptance per position"),
        )),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "rows"), [(name, rows) for name, all_rows in MALFORMED.items() for rows in all_rows]
)
def test_malformed_records_are_refused_in_one_line(tmp_path: Path, engine: str, rows: list[Any]) -> None:
    path = lines(tmp_path / ("r.log" if engine == "llama.cpp" else "r.jsonl"), rows)
    with pytest.raises(InputError, match=r"^path: .*r\.") as caught:
        import_records(path, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        ("acceptance", "accept", 2), ("acceptance", "accept", -1), ("acceptance", "acc0", 5), ("acceptance", "acc0", None),
        ("acceptance", "prompt_idx", ...), ("acceptance", "accept", ...), ("acceptance", "acc0", ...),
        ("acceptance", "round_idx", None), ("speculator", "conf1", 1.5), ("speculator", "conf0", None),
        ("speculator", "round_idx", 99), ("acceptance", "", ...),
    ],
)  # fmt: skip
def test_malformed_rounds_of_inference_lab_are_refused(tmp_path: Path, file: str, column: str, value: Any) -> None:
    folder = lab(tmp_path / "run", TEXTS)
    path = folder / f"{file}.parquet"
    rows = parquet.read_table(path).to_pylist()
    for at, row in enumerate(rows):
        if value is ...:
            row.pop(column, None)
        elif at == 1:
            row[column] = value
    parquet.write_table(pa.Table.from_pylist(rows), path)
    if not column:
        path.write_bytes(b"no table")
    with pytest.raises(InputError, match=r"^path: ") as caught:
        import_records(folder, tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


DEPTH = 5
LENGTHS = {"ngram": "acc_ngram", "eagle": "acc_eagle"}
COLUMNS = {"tokens": "token_ids"}

Row = dict[str, Any]


def make_rows(texts: int = 6, seed: int = 0) -> list[Row]:
    """Return rows of texts of 2 to 17 tokens; lengths may exceed the end of the text and `DEPTH`."""
    draw = np.random.default_rng(seed)
    rows = []
    for number, total in enumerate(draw.integers(2, 18, texts).tolist()):
        lengths = {column: (draw.geometric(0.4, total) - 1).tolist() for column in LENGTHS.values()}
        tokens = draw.integers(3, 90, total).tolist()
        rows.append(
            {"id": f"r{number}", "group": "ab"[number % 2], "prompt_tokens": 5 + number, "token_ids": tokens, **lengths}
        )
    return rows  # fmt: skip


def write(rows: list[Row], path: Path) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        cells = [
            [json.dumps(v).replace('"', '""') if isinstance(v, list) else str(v) for v in row.values()] for row in rows
        ]
        lines = [",".join(f'"{cell}"' for cell in line) for line in [list(rows[0]), *cells]]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    path = write(make_rows(), folder / "table.parquet")
    return import_table(path, folder / "trace", LENGTHS, columns=COLUMNS, free=["ngram"], depth=DEPTH)


@pytest.fixture(scope="module")
def costs(profile):
    """Costs of two drafters; the first one is nearly free."""
    low, high = (dataclasses.replace(t, draft_s=(1e-6, 1e-6), later_draft_s=1e-6) for t in (profile.low, profile.high))
    return dataclasses.replace(profile, low=low, high=high, temperature=0.0, others=(profile,))


def test_a_trace_has_what_the_table_says(trace):
    header, rows = check_trace(trace.folder).header, make_rows()
    assert (header.depth, header.tree.drafters, header.readings) == (DEPTH, 2, ("nothing", "path"))
    table = {
        name: column_array(column)
        for name, column in zip(trace.table().column_names, trace.table().columns, strict=True)
    }
    at = 0
    for text in rows:
        total, run, rate = len(text["token_ids"]), 0, 0.0
        for anchor in range(1, total):
            agrees = text["acc_ngram"][anchor - 1] > 0  # with the anchor token, the one at index anchor - 1
            run, rate = (run + 1) * agrees, 0.9 * rate + 0.1 * agrees
            assert (table["prompt_id"][at], table["anchor"][at], table["text_tokens"][at]) == (
                text["id"],
                anchor,
                total,
            )
            assert table["agreement_run"][at].tolist() == [run, 0]
            np.testing.assert_allclose(table["agreement_rate"][at], [rate, 0], rtol=1e-6)
            for node, (depth, drafter) in enumerate(zip(header.tree.depth[1:], header.tree.drafter[1:], strict=True)):
                length = min(text[list(LENGTHS.values())[drafter]][anchor], total - anchor)
                known = depth <= length
                token = text["token_ids"][anchor + depth - 1] if known else -1
                observed = depth <= length + 1 and anchor + depth <= total
                recorded = (table[name][at, node] for name in ("accepted", "tokens", "observed"))
                assert tuple(recorded) == (known, token, observed)
            at += 1
    assert at == len(table["anchor"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_formats_and_the_bonus_give_the_same_rows(trace, suffix, tmp_path):
    rows = [row | {name: [n + 1 for n in row[name]] for name in LENGTHS.values()} for row in make_rows()]
    path = write(rows, tmp_path / f"table.{suffix}")
    other = import_table(path, tmp_path / "out", LENGTHS, columns=COLUMNS, free=["ngram"], depth=DEPTH, bonus=True)
    assert other.table().equals(trace.table())


def simulate(text: Row, choose: Any) -> list[tuple[int, int]]:
    """Return (anchor, committed) of the rounds of a text; `choose(anchor)` returns (column, draft length)."""
    rounds, anchor, total = [], 1, len(text["token_ids"])
    while anchor < total:
        column, length = choose(anchor)
        committed = min(min(text[column][anchor], length) + 1, total - anchor)
        rounds.append((anchor, committed))
        anchor += committed
    return rounds


@pytest.mark.parametrize("length", [0, 1, 3, DEPTH])
@pytest.mark.parametrize("drafter", LENGTHS)
def test_fixed_lengths_play_the_rounds_of_the_table(trace, costs, drafter, length):
    rounds = replay(trace, load_policy(f"fixed:{length}@{drafter}"), costs)
    played = list(zip(rounds.anchor.tolist(), rounds.committed.tolist(), strict=True))
    assert played == [one for text in make_rows() for one in simulate(text, lambda t: (LENGTHS[drafter], length))]


def test_routing_by_agreement_plays_the_rounds_of_the_table(trace, costs):
    rounds = replay(trace, ThresholdRoute("agreement_run", 1, [FixedLength(4), FixedLength(2)]), costs)
    expected = []
    for text in make_rows():

        def choose(anchor: int, text: Row = text) -> tuple[str, int]:
            return ("acc_ngram", 4) if text["acc_ngram"][anchor - 1] else ("acc_eagle", 2)

        expected += simulate(text, choose)
    assert list(zip(rounds.anchor.tolist(), rounds.committed.tolist(), strict=True)) == expected
    assert (rounds.drafting.sum(1) <= 1).all() and rounds.drafting.any(0).all()
    report = evaluate(trace, costs, [load_policy("agreement?lengths=4+2"), "fixed:2@eagle"])
    assert report["agreement?lengths=4+2"].speedup.value > 0


def changed(**values: Any) -> list[Row]:
    """Return the rows with other values in the second one."""
    rows = make_rows()
    rows[1] = {key: value for key, value in (rows[1] | values).items() if value is not ...}
    return rows


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (changed(acc_eagle=[1, 2]), {}, "line 2.*lengths in 'acc_eagle'.*got 2"),
        (changed(acc_ngram=[-1] * len(make_rows()[1]["token_ids"])), {}, "line 2.*0 or more in 'acc_ngram'"),
        (changed(acc_ngram="many"), {}, "line 2.*acc_ngram"),
        (changed(token_ids=None), {}, "line 2.*list of whole numbers.*token_ids"),
        (changed(prompt_tokens=-4), {}, "line 2.*number of tokens in 'prompt_tokens'"),
        (changed(id=None), {}, "line 2.*id"),
        (changed(id="r0", group="a"), {}, "distinct ids.*r0.*sample"),
        (make_rows(), {"lengths": {"eagle": "acc_eagel"}}, "column 'acc_eagel' \\(did you mean 'acc_eagle'"),
        (make_rows(), {"columns": {}}, "column 'tokens'"),
        (make_rows(), {"columns": {"token": "token_ids"}}, "column.*'token'.*tokens"),
        (make_rows(), {"lengths": {"a b": "acc_eagle"}}, "lengths.*'a b'"),
        (make_rows(), {"free": ["engram"]}, "free.*'engram'.*ngram"),
        (make_rows(), {"bonus": True}, "1 or more.*included"),
        (make_rows(), {"depth": 0}, "depth"),
        ([], {}, "table"), (make_rows(), {"columns": {**COLUMNS, "sample": "draw"}}, "column 'draw'"),
        ([row | {"acc_ngram": [0] * len(row["token_ids"]), "acc_eagle": [0] * len(row["token_ids"])} for row in make_rows()],
         {}, "no token was accepted"),
        ([{**make_rows()[0], "token_ids": [3], "acc_ngram": [1], "acc_eagle": [0]}], {}, "two tokens"),
    ],
)  # fmt: skip
def test_malformed_tables_are_refused(rows, options, words, tmp_path):
    path = write(rows, tmp_path / "table.jsonl")
    with pytest.raises(InputError, match=words) as caught:
        import_table(path, tmp_path / "out", **{"lengths": LENGTHS, "columns": COLUMNS, **options})
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
