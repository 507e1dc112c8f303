"""Plain batched decoding: the same as one prompt at a time, by a loop without cache or mask."""

from __future__ import annotations

import pytest
import torch
from conftest import EOS, NEW
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import gumbel


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@torch.no_grad()
def slow_text(pair: Pair, prompt: list[int], key: int, new: int, temperature: float) -> tuple[list[int], torch.Tensor]:
    text, rows = list(prompt), []
    while len(text) < len(prompt) + new and text[len(prompt) :][-1:] != [EOS]:
        row = pair.target(torch.tensor([text])).logits[0, -1]
        rows.append(row)
        if temperature:
            noise = gumbel(key, torch.tensor([len(text)]), pair.vocabulary, torch.float64)[0]
            row = torch.log_softmax(row / temperature, -1) + noise
        text.append(int(row.argmax()))
    return text[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_padded_batch_gives_each_prompts_own_text_and_rows(
    pair: Pair, prompt_ids: list[list[int]], temperature: float
) -> None:
    keys = [5 * i - 7 for i in range(len(prompt_ids))]
    batch = plain_texts(pair, prompt_ids, keys, NEW, temperature)
    assert any(text[-1] == EOS and len(text) < NEW for text in batch.tokens)
    for i, (prompt, key) in enumerate(zip(prompt_ids, keys, strict=True)):
        text, rows = slow_text(pair, prompt, key, NEW, temperature)
        assert batch.tokens[i] == text
        torch.testing.assert_close(batch.logits[i, : len(text)], rows, atol=1e-9, rtol=0)


def test_padding_does_not_change_the_text_under_eager_attention(
    eager_pair: Pair, pair: Pair, prompt_ids: list[list[int]]
) -> None:
    keys = list(range(len(prompt_ids)))
    assert (
        plain_texts(eager_pair, prompt_ids, keys, NEW, 0.7).tokens
        == plain_texts(pair, prompt_ids, keys, NEW, 0.7).tokens
    )


def test_ignore_eos_goes_on_to_the_limit(pair: Pair, prompt_ids: list[list[int]]) -> None:
    keys = list(range(len(prompt_ids)))
    cut = plain_texts(pair, prompt_ids, keys, NEW).tokens
    whole = plain_texts(pair, prompt_ids, keys, NEW, ignore_eos=True).tokens
    assert all(len(text) == NEW for text in whole)
    assert [text[: len(short)] for text, short in zip(whole, cut, strict=True)] == cut


def test_another_key_samples_another_text_but_not_at_temperature_0(pair: Pair) -> None:
    prompts = [[7, 8, 9]] * 3
    assert len(set(map(tuple, plain_texts(pair, prompts, [1, 2, 3], NEW, 0.7).tokens))) == 3
    assert len(set(map(tuple, plain_texts(pair, prompts, [1, 2, 3], NEW, 0.0).tokens))) == 1
