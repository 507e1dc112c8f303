"""Numbers out of range are refused by name; both ends of every range are allowed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from specstop.decode.models.pair import load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.policies.arguments import LIMITS, PARAMS, check_params
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength


@pytest.mark.parametrize("name", [*LIMITS, *PARAMS])
def test_both_ends_of_a_limit_are_allowed_and_nothing_beyond(name):
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
def test_the_ends_of_the_temperatures_give_the_targets_text(temperature, dtype, pair_folder):
    pair = load_pair(pair_folder / "target", pair_folder / "draft", dtype=str(dtype).removeprefix("torch."))
    assert pair.tokenizer is not None
    ids = [list(pair.tokenizer("w7 w8 w9")["input_ids"])]
    plain = plain_texts(pair, ids, [stream_key(0, "a")], 12, temperature).tokens
    for verification in ("match", "rejection"):
        settings = Settings(temperature, 12, verification=verification)
        (result,) = decode(pair, ["w7 w8 w9"], FixedLength(3), settings=settings, ids=["a"])
        assert result.tokens
        if verification == "match" and dtype == torch.float32:  # half precision rounds a single row differently
            assert list(result.tokens) == plain[0]
