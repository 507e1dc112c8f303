"""Profiles from tables of measured calls: prices against the rows, uncertainty, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import cli
from specstop.policies.errors import InputError
from specstop.policies.profile import Profile
from specstop.policies.profile_table import profile_from_table

HEADER = "part,requests,tokens,context,ms,error\n"
TABLE = (
    HEADER
    + """target,1,1,512,10,
target,1,3,512,11,
target,1,5,512,14,
target,1,6,512,12,
target,8,8,512,12,
target,8,48,512,20,
target,1,1,2048,13,
target,1,5,2048,17,
target,1,6,2048,15,
draft,1,,,1,
draft,8,,,2.4,
first draft,1,,,1.5,
first draft,8,,,3,
outside,,,,0.5,
prefill,,100,,20,
prefill,,300,,40,
"""
)


def write(folder: Path, text: str) -> Path:
    path = folder / "calls.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rounds_cost_what_the_rows_say(tmp_path: Path) -> None:
    profile = profile_from_table(write(tmp_path, TABLE), depth=5)
    one = np.ones(1, dtype=np.int64)
    for context, drafted, ms in (
        (512, 0, 10.5), (512, 2, 11 + 0.5 + 1.5 + 1), (512, 1, 10.5 + 0.5 + 1.5), (2048, 0, 13.5),
        (1280, 5, 13.5 + 0.5 + 1.5 + 4),
        (512, 4, 12 + 0.5 + 1.5 + 3),  # a call of six tokens is cheaper than one of five, and is made instead
    ):  # fmt: skip
        k = one * drafted
        assert profile.round_seconds(one * context, k, k, one, 0 * one, 0.0)[0] == pytest.approx(ms * 1e-3), drafted
    k = np.full(8, 3)
    batch = profile.batch_seconds(np.full(8, 512.0), k, k, 0 * k, 0.0)
    assert batch == pytest.approx((12 + 8 * (32 - 8) / 40 + 0.5 + 3 + 2 * 2.4) * 1e-3)
    assert profile.prefill_seconds(200) == pytest.approx(0.030)
    assert profile.low.verify_s[4] > profile.low.verify_s[5] and profile.padded()[4] == 5


def test_caches_cost_by_tokens_and_a_line_is_fitted_in_the_context(tmp_path: Path) -> None:
    rows = "target,,1,,5,\ntarget,,65,,6,\ndraft,,,,1,\ncache,,,,0.001,\n"
    profile = profile_from_table(write(tmp_path, HEADER + rows), depth=3, batch=[1, 4])
    for context in (100.0, 9000.0):
        seconds = float(profile.verify_s(4, 4, context))
        assert seconds == pytest.approx((5 + 3 / 64 + 0.004 * context) * 1e-3, rel=1e-6)
    rows = "".join(f"target,1,{n},{c},{5 + c / 100 + (c == 200) * 0.3},\n" for n in (1, 2) for c in (100, 200, 300))
    profile = profile_from_table(write(tmp_path, HEADER + rows + "draft,,,,1,\n"), depth=1)
    assert [t.verify_s[0] for t in (profile.low, profile.high)] == pytest.approx([0.0061, 0.0081])


@pytest.mark.parametrize("form", ["an error", "repeated rows"])
def test_draws_of_a_profile_have_the_error_of_the_table(tmp_path: Path, form: str) -> None:
    # Four values with a standard deviation of 0.6 have a mean with an error of 0.3.
    values = ["10,0.3"] if form == "an error" else [f"{10 + sign * 0.6 * 0.75**0.5}," for sign in (1, -1, 1, -1)]
    lines = [*(f"target,1,1,,{value}" for value in values), "target,1,2,,11,"]
    profile = profile_from_table(write(tmp_path, HEADER + "\n".join([*lines, "draft,,,,1,0.1"]) + "\n"), depth=1)
    draws = [profile.resampled(np.random.default_rng(seed)) for seed in range(400)]
    plain = np.array([draw.low.verify_s[0] for draw in draws]) * 1e3
    assert plain.mean() == pytest.approx(10, abs=0.05) and plain.std() == pytest.approx(0.3, rel=0.15)
    drafts = np.array([draw.low.draft_s[0] for draw in draws]) * 1e3
    assert abs(np.corrcoef(plain, drafts)[0, 1]) < 0.6, "errors of different rows are independent"
    assert len({draw.low.verify_s[1] for draw in draws}) == 1


MALFORMED = {
    "no such file": None, "no table": "\x00\x01", "without a column": TABLE.replace(",ms", ",seconds"),
    "without rows": HEADER, "without drafts": TABLE.replace("draft", "prefill").replace("first prefill", "outside"),
    "an unknown part": TABLE.replace("outside", "inside"), "a negative time": TABLE.replace("14,", "-14,"),
    "no time": TABLE.replace(",14,", ",,"), "not a number": TABLE.replace(",14,", ",nan,"),
    "a call in no time": TABLE.replace(",14,", ",0,"),
    "fewer tokens than requests": TABLE.replace("target,8,8,", "target,8,4,"),
    "tokens of a draft step": TABLE.replace("draft,1,,", "draft,1,3,"),
    "a fraction of a request": TABLE.replace("draft,8,", "draft,8.5,"),
    "two costs of a prompt": TABLE.replace("prefill,,100,,20,", "prefill,,100,,20,\nprefill,2,100,,30,"),
    "a missing value": TABLE.replace("prefill,,100,,20,", "prefill,,100"),
    "a context in some rows": TABLE.replace("target,1,3,512", "target,1,3,"),
}  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED.values(), ids=list(MALFORMED))
def test_malformed_tables_are_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "calls.csv" if content is None else write(tmp_path, content)
    with pytest.raises(InputError, match=r"calls\.csv") as caught:
        profile_from_table(path, depth=5)
    assert "\n" not in str(caught.value)


def test_what_was_not_measured_is_not_guessed(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE)
    for options, noun in (({"depth": 6}, "at most 5"), ({"depth": 5, "batch": [16]}, "for 16 requests")):
        with pytest.raises(InputError, match=noun):
            profile_from_table(path, **options)  # type: ignore[arg-type]


def test_the_table_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    profile = profile_from_table(write(tmp_path, page.split("```csv\n")[1].split("```")[0]), depth=3)
    assert profile.batch is not None and profile.batch.sizes == (1, 64)
    assert profile.verify_s(64, 64, 1000.0) * 1e3 == pytest.approx(5.9 + 63 / 511 * 10.7 + 64 * 0.04 + 1.2, rel=1e-4)


def test_the_command_writes_the_profile(tmp_path: Path) -> None:
    path, out = write(tmp_path, TABLE), tmp_path / "profile.json"
    assert cli("profile", "--from", path, "--depth", 5, "--out", out).code == 0
    assert Profile.load(out).low == profile_from_table(path, depth=5).low
    answer = cli("profile", "--from", path, "--policy", "fixed:2", "--out", tmp_path / "other.json")
    assert answer.code == 2 and answer.err.startswith("specstop: --policy") and not (tmp_path / "other.json").exists()
