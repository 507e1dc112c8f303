"""`bench` tells a text that leaves the plain one at a tie from one that is wrong."""

from __future__ import annotations

import dataclasses

import torch
from small_models import table
from specstop.decode.benchmark import bench, count_differences
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import join
from specstop.decode.settings import Settings
from specstop.policies.fixed import FixedLength

PROMPTS = table.prompts(2)
SETTINGS = Settings(0.0, 8)


def test_only_near_equal_scores_are_a_tie() -> None:
    target = table.build("llama", torch.float32)
    pair = join(target, target)
    plain = [Speculator(pair, FixedLength(0), SETTINGS).generate(prompt) for prompt in PROMPTS]
    changed = [
        dataclasses.replace(one, tokens=(*one.tokens[:3], (one.tokens[3] + 1) % 64, *one.tokens[4:])) for one in plain
    ]
    assert count_differences(pair, SETTINGS, PROMPTS, plain, plain) == (0, 0)
    assert count_differences(pair, SETTINGS, PROMPTS, [plain[0], changed[1]], plain) == (0, 1)
    with torch.no_grad():  # every token has a twin with the same score
        target.lm_head.weight[1::2] = target.lm_head.weight[::2]
    plain = [Speculator(pair, FixedLength(0), SETTINGS).generate(prompt) for prompt in PROMPTS]
    twins = [dataclasses.replace(one, tokens=(*one.tokens[:3], one.tokens[3] ^ 1, *one.tokens[4:])) for one in plain]
    assert count_differences(pair, SETTINGS, PROMPTS, twins, plain) == (2, 0)


def test_bench_counts_no_wrong_text_of_a_lossless_policy() -> None:
    target = table.build("llama", torch.bfloat16)
    lines = bench(join(target, table.noisy(target)), PROMPTS, [FixedLength(3)],
                  settings=SETTINGS)  # fmt: skip
    assert [line.wrong for line in lines] == [0, 0]
    assert all(line.same_text + line.ties == len(PROMPTS) for line in lines)
