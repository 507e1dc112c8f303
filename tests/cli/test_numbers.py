"""Numbers out of range: refused by name before anything is loaded, by commands and functions alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import cli
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import Pair, check_device, load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.arguments import LIMITS, PARAMS, check_params
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength
from specstop.train.heads.fitting import FitOptions

HUGE = 10**20
COLD = "--temperature: expected 0 or more"
REFUSED: dict[str, tuple[str, str]] = {
    "a temperature below all floats of 32 bits": ("decode w7 --temperature 1e-320", COLD),
    "a temperature at the end of float32": ("decode w7 --temperature 1e-45", COLD),
    "a temperature that is no number": ("bench --temperature nan", COLD),
    "an endless temperature": ("demo --temperature inf", COLD),
    "a cold trace": ("collect --out {new} --temperature 1e-45", COLD),
    "a cold profile": ("profile --out {new} --temperature 1e-45", COLD),
    "a deep trace": ("collect --out {new} --depth 100000", "--depth: expected a whole number"),
    "a deep profile": (f"profile --out {{new}} --depth {HUGE}", "--depth: expected a whole number"),
    "many shards": ("collect --out {new} --extra shards=100000", "--extra shards: expected a whole number"),
    "no end of shards": (f"collect --out {{new}} --extra shards={HUGE}", "--extra shards: expected a whole number"),
    "no end of tokens": (f"decode w7 --max-new-tokens {HUGE}", "--max-new-tokens: expected a whole number"),
    "no end of memory": (f"collect --out {{new}} --extra memory={HUGE}", "--extra memory: expected a whole number"),
    "no end of repeats": (f"profile --out {{new}} --repeats {HUGE}", "--repeats: expected a whole number"),
    "a large seed": (f"collect --out {{new}} --seed {HUGE}", "--seed: expected a whole number"),
    "a seed below 0": ("evaluate --traces {new} --profile {new} --out {new} --seed -1", "--seed: expected"),
    "no end of epochs": (f"train --traces {{new}} --profile {{new}} --out {{new}} --epochs {HUGE}", "--epochs: expected"),
    "a rate of nothing": (
        "train --traces {new} --profile {new} --out {new} --learning-rate 1e-320",
        "--learning-rate: expected",
    ),
    "a penalty of nothing": (
        "decode w7 --sampling repetition_penalty=1e-320",
        "--sampling repetition_penalty: expected",
    ),
    "a whole number in e": (
        "collect --out {new} --depth 1e20",
        "unable to parse string as an integer, not '1e20'. Try --help.",
    ),
    "a number in words": (
        "collect --out {new} --temperature warm",
        "Invalid value for '--temperature': Input should be a valid number, unable to parse string as a number, not 'warm'. "
        "Try --help.",
    ),
    "digits without end": (f"collect --out {{new}} --depth {'9' * 5000}", "'--depth': "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_refuses_it_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    """There is no pair, trace or profile that could be loaded."""
    command, message = REFUSED[name]
    answer = cli(*command.format(new=tmp_path / "new").split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("specstop: ") and answer.err.count("\n") == 1
    assert message in answer.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 0.009, -0.7, 100.5, 1e308, float("nan"), float("inf")])
def test_functions_refuse_the_same_temperatures(temperature: float, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="temperature: expected 0 or more"):
        Settings(temperature, verification="match")
    with pytest.raises(InputError, match="temperature: expected 0 or more"):
        collect(pair, [Prompt("a", "w7")], tmp_path / "new", temperature=temperature)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Settings(max_depth=100_000), "max_depth: expected"),
        (lambda: Settings(max_new_tokens=HUGE), "max_new_tokens: expected"),
        (lambda: Settings(max_new_tokens=2.5), "max_new_tokens: expected"),
        (lambda: Settings(max_depth=True), "max_depth: expected"),
        (lambda: Settings("0.7", verification="match"), "temperature: expected 0 or more.*, not '0.7'"),
        (lambda: SamplingParams(repetition_penalty=1e-45), "repetition_penalty: expected"),
        (lambda: SamplingParams(top_k=10**5000), "top_k: expected"),
        (lambda: FitOptions(learning_rate=0.0), "learning_rate: expected"),
        (lambda: FitOptions(batch_size=0), "batch_size: expected"),
    ],
)
def test_functions_refuse_numbers_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 100_000}, "depth: expected"),
        ({"depth": 0}, "depth: expected"),
        ({"shards": 3, "max_new_tokens": 8}, "shards: expected at most 2, one for each prompt, not 3"),
        ({"max_new_tokens": 1}, "max_new_tokens: expected"),
        ({"memory": 0}, "memory: expected"),
        ({"seed": 2**31}, "seed: expected"),
    ],
)
def test_collect_refuses_them_as_its_command_does(
    options: dict[str, Any], message: str, pair: Pair, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        collect(pair, [Prompt("a", "w7"), Prompt("b", "w8")], tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [*LIMITS, *PARAMS])
def test_both_ends_of_a_limit_are_allowed_and_nothing_beyond(name: str) -> None:
    limit, is_option = (LIMITS | PARAMS)[name], name in LIMITS
    check = partial(limit.check, f"--{name}") if is_option else lambda value: check_params({name: value})
    beyond = 1 if isinstance(limit.low, int) else max(limit.low / 2, 1e-9 * limit.high)
    for value in (limit.low, limit.high, np.int64(limit.high) if float(limit.high).is_integer() else limit.high):
        check(value)
    for value in (limit.low - beyond, limit.high + beyond, float("nan"), float("inf"), "7", None, True, 10**400):
        if not (value == 0 and limit.zero):
            with pytest.raises(InputError, match=f"{name.replace('-', '_')}: expected "):
                check(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_the_ends_of_the_temperatures_give_the_targets_text(
    temperature: float, dtype: torch.dtype, pair_folder: Path
) -> None:
    pair = load_pair(pair_folder / "target", pair_folder / "draft", dtype=str(dtype).removeprefix("torch."))
    assert pair.tokenizer is not None
    ids = [list(pair.tokenizer("w7 w8 w9")["input_ids"])]
    plain = plain_texts(pair, ids, [stream_key(0, "a")], 12, temperature).tokens
    for verification in ("match", "rejection"):
        settings = Settings(temperature, 12, verification=verification)
        (made,) = decode(pair, ["w7 w8 w9"], FixedLength(3), settings=settings, ids=["a"])
        assert made.tokens
        if verification == "match" and dtype == torch.float32:  # half precision rounds a row by itself otherwise
            assert list(made.tokens) == plain[0]


def test_a_device_without_numbers_is_refused(pair_folder: Path) -> None:
    assert check_device("cpu").type == "cpu"
    with pytest.raises(InputError, match="device: 'meta' cannot be used here"):
        check_device("meta")
    answer = cli(
        "decode", "w7", "--target", pair_folder / "target", "--draft", pair_folder / "draft", "--device", "meta"
    )
    assert (answer.code, answer.err.count("\n"), answer.out) == (2, 1, "")
    assert answer.err.startswith("specstop: --device: 'meta' cannot be used here")
