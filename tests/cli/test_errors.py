"""Errors of users and malformed files: exit code 2, one line on standard error, and no file is changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import cli, files, refused, write_prompts
from conftest import build_model, make_prompts
from hypothesis import HealthCheck, given, settings, strategies as st
from specstop.collect.schema import HEADER_KEY
from specstop.collect.store import ROWS_KEY, Trace
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate


def edit(path: Path, **entries: object) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def place(tmp_path_factory, pair_folder, sides, full_profile, tokenizer, learned):
    """A folder of valid inputs, and of copies with one fault each."""
    here = tmp_path_factory.mktemp("place")
    write_prompts(here / "prompts.jsonl", make_prompts(5, "e", 30))
    for name, trace in zip(("fit", "held"), sides, strict=True):
        shutil.copytree(trace.folder, here / name)
    for name in ("target", "draft"):
        shutil.copytree(pair_folder / name, here / name)
    full_profile.save(here / "profile.json")
    save_policy(learned, here / "policy")
    evaluate(sides[1], full_profile, [], out=here / "report")
    build_model().save_pretrained(here / "words")
    tokenizer.save_pretrained(here / "words")
    vocabulary = here / "words" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"w7"', '"v7"'))
    for name, text in {
        "broken.jsonl": '{"prompt": "w7"}\n\n{"prompt": "w8"\n',
        "typo.yaml": "dpeth: 3\n", "twice.yaml": "max-new-tokens: 4\nmax_new_tokens: 8\n",
        "noyaml.yaml": "a: [1\n", "other.yaml": "command: decode\n",
        "profile.txt": "{}", "full/mine.txt": "mine\n", "few.json": "[1, 2]", "damaged/report.json": '{"kind": "report"}',
    }.items():  # fmt: skip
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    faults: dict[str, tuple[str, Callable[[Path], None]]] = {
        "computes-nan": ("target", lambda folder: edit(folder / "config.json", rms_norm_eps=-1e9)),
        "changed": ("policy", lambda folder: edit(folder / "policy.json", name="other")),
        "schema": ("held", lambda folder: edit(folder / "header.json", schema=6)),
        "shards": ("held", lambda folder: edit(folder / "header.json", shards=99_999)),
        "infinite.json": ("profile.json", lambda path: edit(path, round_s=float("inf"))),
    }
    for name, (original, fault) in faults.items():
        copy = shutil.copytree if (here / original).is_dir() else shutil.copy
        copy(here / original, here / name)
        fault(here / name)
    return here


PAIR = "--target {target} --draft {draft}"
COMMANDS = {
    "collect": f"{PAIR} --prompts {{prompts.jsonl}} --depth 2 --max-new-tokens 4 --out {{new}}",
    "profile": f"{PAIR} --prompts {{prompts.jsonl}} --depth 2 --repeats 1 --out {{new}}",
    "train": "--traces {fit} --profile {profile.json} --out {new}",
    "evaluate": "--traces {held} --profile {profile.json} --out {new}",
    "decode": f"w7 {PAIR} --max-new-tokens 4",
    "train-drafter": "--target {target} --prompts {prompts.jsonl} --out {new} --max-new-tokens 12",
    "deploy": "--out {new}",
}
"""Options with which a command succeeds; a case appends options, which take precedence."""

CASES: tuple[tuple[str, str, str], ...] = (
    # models
    ("collect", "--target {nowhere}", "nowhere does not exist"), ("decode", "--draft {words}", "tokenizer"),
    ("decode", "--target {computes-nan}", "not finite"), ("decode", "--drafter modle", "did you mean 'model'"),
    ("= decode w7 --target {target}", "", "both --target and --draft"),
    # prompts
    ("collect", "--prompts {none.jsonl}", "none.jsonl does not exist"), ("collect", "--column turn", '"turn"'),
    ("collect", "--prompts {broken.jsonl}", "line 3: invalid JSON"),
    ("collect", "--chat", "--chat: the tokenizer has no chat template"),
    # numbers
    ("collect", "--depth 0", "--depth: expected"), ("collect", f"--depth {'9' * 5000}", "'--depth'"),
    ("profile", "--budget inf", "--budget: expected"),
    # rounds and sampling
    ("decode", "--policy fixed:x", "expected a number after the colon"), ("decode", "--tree 4;2", "--tree: expected widths"),
    ("decode", "--verification block --tree 2,2 --temperature 1", "block: expected a chain"),
    ("decode", "--sampling top_k=1 --sampling top_k=2", "each key once"),
    ("decode", "--sampling json_schema={few.json} --sampling grammar={few.json}", "not both"),
    ("decode", "--sampling grammar=5", "expected a text file"),
    ("collect", "--extra profile=5", "expected the file 5"), ("collect", "--extra completions=[1]", '"[1]"'),
    ("collect", "--extra shards=100000", "--extra shards: expected"), ("collect", "--extra explore=0.2", "--collector live"),
    # training
    ("train", "--profile {infinite.json}", "not finite"), ("train", "--traces {policy}", "header.json"),
    ("train", "--head mlp,logistic", "--tune"), ("train", "--head mlp --param widht=8", "did you mean 'width'?"),
    ("train", "--head mlp --trainer accelerator=gpuu", "--trainer: "), ("train", "--out {fit} --overwrite", "--out"),
    ("train-drafter", "--kind eagle", "--kind: expected one of medusa, hydra, ctc, layer"),
    # evaluation and export
    ("evaluate", "--policy {changed}", "checksum differs"), ("evaluate", "--train-traces {held}", "--train-traces"),
    ("evaluate", "--policy fixed:2 --policy fixed:2", "two policies are called"), ("evaluate", "--arrivals 3", "--batch"),
    ("evaluate", "--profile {profile.txt}", "--profile: expected a latency profile"),
    ("evaluate", "--out {held} --overwrite", "--out"),
    ("= evaluate --traces {schema} --profile {profile.json} --out {new}", "", "schema 6"),
    ("= evaluate --compare {damaged} --compare {report}", "", "damaged"),
    ("deploy", "--to vlm", "did you mean 'vllm'?"), ("deploy", "--to vllm", "--traces and --profile: expected"),
    ("deploy", "--to vllm --traces {fit} --profile {profile.json} --held-out {fit}", "--traces"),
    # results
    ("collect", "--out {full}", "--overwrite"), ("evaluate", "--out {full}", "not empty"),
    ("collect", "--out {full} --resume", "header.json"), ("profile", "--out {profile.json}", "exists"),
    ("collect", "--config {typo.yaml}", "did you mean 'depth'?"), ("collect", "--config {twice.yaml}", "twice"),
    ("collect", "--config {noyaml.yaml}", "not YAML"), ("collect", "--config {other.yaml}", "`specstop decode`"),
    ("= info {prompts.jsonl}", "", "prompts.jsonl"), ("= info {shards}", "", "shards"),
    # the parser
    ("= collect", "", "--out"), ("= decode --depht 3", "", "--depht"), ("= polices", "", "polices"),
)  # fmt: skip


@pytest.mark.parametrize(("command", "options", "noun"), CASES, ids=[f"{c} {o}"[:60] for c, o, _ in CASES])
def test_a_fault_is_one_line_and_nothing_is_written(place, command, options, noun, monkeypatch):
    monkeypatch.chdir(place)
    words = command.removeprefix("= ") if command.startswith("= ") else f"{command} {COMMANDS[command]} {options}"
    arguments = [re.sub(r"\{([^}]*)\}", lambda match: str(place / match[1]), word) for word in words.split()]
    before = files(place)
    assert noun in refused(*arguments)
    assert files(place) == before


# Malformed files

several = settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([10**9, 10**30, -(2**70)]), st.floats(),
    st.text(max_size=20), st.sampled_from(["", "../x", "\x1b[31mred\x1b[0m", "<script>", "x" * 10_000]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5
)  # fmt: skip


def one_line_or_success(*words: object) -> None:
    """Run a command that succeeds or fails with one line; its output has no control sequence."""
    answer = cli(*words)
    assert answer.code in (0, 2) and "\x1b" not in answer.out + answer.err and "Traceback" not in answer.err
    if answer.code == 2:
        assert answer.err.count("\n") == 1 and answer.out == ""


FIELDS = st.sampled_from(["depth", "seed", "policy", "quiet", "limit", "out"])


@several
@given(raw=VALUES | st.dictionaries(FIELDS, VALUES))
def test_any_configuration_is_refused_in_one_line(raw, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    one_line_or_success("train", "--config", tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


def forged(trace: Trace, out: Path, header: dict[str, Any], prefix: str = "") -> Path:
    """Return a copy of a trace with changed header, prompt ids and groups, and consistent metadata of shards."""
    shutil.rmtree(out, ignore_errors=True)
    folder = shutil.copytree(trace.folder, out)
    text = json.dumps({**json.loads((folder / "header.json").read_text()), **header})
    (folder / "header.json").write_text(text)
    for shard in (folder / "data").glob("*.parquet"):
        rows = pq.read_table(shard)
        for name in ("prompt_id", "group") if prefix else ():
            texts = pa.array([prefix + text for text in rows[name].to_pylist()])
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), texts)
        pq.write_table(rows.replace_schema_metadata({HEADER_KEY: text, ROWS_KEY: str(len(rows))}), shard)
    return folder


@settings(several, max_examples=80)
@given(data=st.data())
def test_any_value_in_a_field_of_a_profile_or_header(full_profile, sides, tmp_path, data):
    profile, header = full_profile.to_dict(), json.loads(sides[1].header.to_json())
    name, value = data.draw(st.sampled_from(sorted({*profile, *header}))), data.draw(VALUES)
    if name in header:
        one_line_or_success("info", forged(sides[1], tmp_path / "trace", {name: value}))
    if name in profile:
        (tmp_path / "profile.json").write_text(json.dumps({**profile, name: value}))
        one_line_or_success("info", tmp_path / "profile.json")


def test_control_characters_of_ids_and_names_are_escaped(sides, full_profile, tmp_path):
    name = "\x1b[31m<script>alert(1)</script>|`x`\x9b"

    hostile = {"target": name, "draft": name, "facts": {"prompts from": name, "device": name}}
    folder = forged(sides[1], tmp_path / "trace", hostile, name)
    full_profile.save(tmp_path / "profile.json")
    report = tmp_path / "report"
    for command in (
        ("info", folder), ("info", folder, "--json"), ("info", folder, "--check"),
        ("evaluate", "--traces", folder, "--profile", tmp_path / "profile.json", "--out", report),
    ):  # fmt: skip
        answer = cli(*command)
        assert answer.code == 0, answer.err
        assert not {"\x1b", "\x9b"} & set(answer.out + answer.err)
    for file in ("report.md", "report.html"):
        text = (report / file).read_text()
        assert not {"\x1b", "\x9b"} & set(text)
        assert "<script>alert" not in text.replace("\\<script>", "")
