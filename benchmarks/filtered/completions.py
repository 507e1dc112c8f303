"""Texts that transformers has sampled, as traces: labels, acceptance beside keyed collection, refusals, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from bars import Bars
from scipy import stats
from specstop.collect.completions import MAX_ERRORS, sampling_balance
from specstop.collect.prompts import Prompt, encode
from specstop.collect.store import Trace
from specstop.decode import Pair, Settings
from specstop.policies.profile import Profile
from specstop.train.fit.run import train
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays

from .heads import DEPTH, TEMPERATURE, Place

BATCH, LEVEL, NEAR = 32, 0.01, 0.01
SETS, WRONG_SETS = 40, 20
WRONG = (0.5, 1.0)


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts: these ones again and again, under ids of their own."""
    return [
        dataclasses.replace(prompts[at % len(prompts)], id=f"{prompts[at % len(prompts)].id}-{at // len(prompts)}")
        for at in range(count)
    ]


@torch.inference_mode()
def sampled(stock: Pair, prompts: Sequence[Prompt], tokens: int, temperature: float, seed: int) -> dict[str, list[int]]:
    """Return the ids of a text after each prompt, as transformers' own `generate` samples them."""
    torch.manual_seed(seed)
    ids, made = encode(prompts, stock.tokenizer, stock.readable - tokens), {}
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        longest = max(map(len, part))
        padded = torch.tensor([[0] * (longest - len(one)) + one for one in part])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in part])
        out: Any = stock.target.generate(  # type: ignore[operator]
            padded, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            max_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
        for prompt, text in zip(prompts[start : start + BATCH], out[:, longest:].tolist(), strict=True):
            made[prompt.id] = text
    return made


def _moments(trace: Trace) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return [K] P(A >= k) over anchors that are not cut, and each text's part in its error: [K] by prompt id."""
    arrays = trace_arrays(trace, features=())
    owner = np.repeat(np.arange(arrays.sequences), arrays.rows.numpy())
    use = ~arrays.cut.numpy()
    reached = arrays.accepted.numpy()[use, None] >= np.arange(1, arrays.depth + 1)
    mean = reached.mean(0)
    parts = np.zeros((arrays.sequences, arrays.depth))
    np.add.at(parts, owner[use], (reached - mean) / use.sum())
    return mean, dict(zip(arrays.prompt_ids, parts, strict=True))


def same_acceptance(one: Trace, two: Trace) -> tuple[float, np.ndarray]:
    """Return the p-value of a joint test that acceptance by depth is the same, clustered by prompt; and the differences."""
    (a, parts_a), (b, parts_b) = _moments(one), _moments(two)
    nothing = np.zeros(len(a))
    off = [parts_a.get(name, nothing) - parts_b.get(name, nothing) for name in {*parts_a, *parts_b}]
    groups: dict[str, np.ndarray] = {}
    for name, part in zip({*parts_a, *parts_b}, off, strict=True):
        prompt = name.rpartition("-")[0]  # samples of one prompt belong together
        groups[prompt] = groups.get(prompt, nothing) + part
    rows = np.stack(list(groups.values()))
    covariance = rows.T @ rows * len(rows) / max(len(rows) - 1, 1)
    use = np.diag(covariance) > 0
    statistic = float((a - b)[use] @ np.linalg.pinv(covariance[np.ix_(use, use)]) @ (a - b)[use])
    return float(stats.chi2.sf(statistic, int(use.sum()))), a - b


def completed(place: Place, stock: Pair, texts: int, costs: Profile, bars: Bars) -> dict[str, Any]:
    """Collect texts of transformers and keyed ones, and check the bars on them.

    Args:
        place: the pair and its prompts.
        stock: the same pair with the engine `plain`.
        texts: how many are tested.
        costs: profile that policies are trained for.
        bars: to add to.
    """
    prompts, length = repeated(place.train, texts), place.tokens + DEPTH
    written = sampled(stock, prompts, length, TEMPERATURE, 1)
    one = place.traces("completions", prompts, completions=written)
    two = place.traces("keyed", prompts)
    arrays = trace_arrays(one, features=())
    labels, expected = len(arrays.accepted), _anchors(place, written)
    bars.add(
        f"{place.name}, positions labelled", labels / expected, labels == expected,
        f"{labels} of {expected} positions of {len(written)} texts; all",
    )  # fmt: skip
    p_value, off = same_acceptance(one, two)
    bars.add(
        f"{place.name}, acceptance by depth", p_value, p_value > LEVEL,
        f"p = {p_value:.3f} that completions and keyed texts are accepted alike, differences "
        f"{' '.join(f'{d:+.4f}' for d in off)}; above {LEVEL}",
    )  # fmt: skip
    refusals = _refusals(place, stock, prompts, written, length, bars)
    return {"p": p_value, "differences": off.tolist(), **refusals, **_trained(place, one, two, costs, bars)}


def _anchors(place: Place, written: dict[str, list[int]]) -> int:
    """Return the positions of texts that a round could start at and that labels can be known of."""
    total = 0
    for text in written.values():
        at = next((n for n, token in enumerate(text, 1) if token in place.pair.eos), None)
        size = min(at, place.tokens) if at is not None else min(len(text) - DEPTH + 1, place.tokens)
        total += max(size - 1, 0)
    return total


def _refusals(
    place: Place, stock: Pair, prompts: Sequence[Prompt], written: dict[str, list[int]], length: int, bars: Bars
) -> dict[str, Any]:
    """Count refused sets: of right texts, and of texts of other temperatures."""
    settings, size = Settings(TEMPERATURE, place.tokens, verification="match"), max(len(prompts) // SETS, 8)
    tokens = encode(prompts, place.pair.tokenizer, 1 << 20)
    by_id = {prompt.id: (prompt, ids) for prompt, ids in zip(prompts, tokens, strict=True)}

    def refused(texts: dict[str, list[int]], sets: int) -> list[bool]:
        names = list(texts)
        parts = [names[at * size : (at + 1) * size] for at in range(sets) if len(names) >= (at + 1) * size]
        found = [sampling_balance(place.pair, settings, [by_id[n] for n in part], texts, length) for part in parts]
        return [abs(one["mean"]) > MAX_ERRORS * one["standard_error"] for one in found]

    right = refused(written, SETS)
    bars.add(
        f"{place.name}, right texts refused", sum(right), sum(right) <= 1,
        f"{sum(right)} of {len(right)} sets of {size}; at most 1",
    )  # fmt: skip
    figures = {"right refused": sum(right), "right sets": len(right)}
    for temperature in WRONG:
        texts = sampled(stock, prompts[: WRONG_SETS * size], length, temperature, 2)
        wrong = refused(texts, WRONG_SETS)
        bars.add(
            f"{place.name}, texts of {temperature:g} refused", sum(wrong), all(wrong),
            f"{sum(wrong)} of {len(wrong)} sets of {size}; all",
        )  # fmt: skip
        figures[f"refused at {temperature:g}"] = sum(wrong)
    return figures


def _trained(place: Place, one: Trace, two: Trace, costs: Profile, bars: Bars) -> dict[str, Any]:
    """Replay policies trained on completions and on keyed texts, on keyed texts of other prompts."""
    test = trace_arrays(place.traces("keyed-test", place.test))
    rates = [
        replay(test, train(traces, costs, head="logistic", progress=place.progress).policy, costs).rate
        for traces in (one, two)
    ]
    ratio = rates[0] / rates[1]
    bars.add(
        f"{place.name}, trained on completions", ratio, abs(ratio - 1) <= NEAR,
        f"{ratio:.4f} of the policy trained on keyed ones; within {NEAR:.0%}",
    )  # fmt: skip
    return {"trained on completions over keyed": ratio}
