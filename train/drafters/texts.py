"""The target's own texts and hidden states, recorded once and read from disk while a drafter is fitted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ...collect.prompts import Prompt
from ...decode.models.cuda import open_cache
from ...decode.models.device import upload
from ...decode.models.outputs import stored
from ...decode.models.pair import Pair
from ...decode.plain import plain_texts
from ...decode.verify.noise import stream_key
from ...policies.display import Progress, silent
from ...policies.errors import InputError
from ...policies.files import read_json, write_atomic, write_json

LIST = "texts.json"
TOGETHER = 16
"""Prompts that are decoded side by side, at most; their texts make a file."""

TASK = "texts of the target"


@dataclass(frozen=True)
class Text:
    """A text and the states of its tokens.

    Attributes:
        tokens: [n] int64, the prompt first.
        prompt: its length.
        greedy: whether the rest was decoded greedily.
        states: [n, H] float32, the target's last hidden states.
    """

    tokens: Tensor
    prompt: int
    greedy: bool
    states: Tensor


def record_texts(
    pair: Pair,
    prompts: Sequence[tuple[Prompt, list[int]]],
    folder: Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    progress: Progress = silent,
) -> Texts:
    """Decode every prompt greedily and at a temperature, and keep texts and states; what is there already is not made again.

    Args:
        pair: whose target it is.
        prompts: with their token ids.
        folder: for the files, one for each few prompts; each is there whole or not at all.
        max_new_tokens: limit of each text.
        temperature: of the sampled ones; 0 = greedy ones alone.
        seed: of the sampling.
        progress: see `Progress`.

    Raises:
        InputError: the folder holds texts of another run.
    """
    said = [[prompt.id, prompt.sample, ids] for prompt, ids in prompts]
    facts = {
        "target": pair.fingerprint["target"], "dtype": str(pair.target.dtype), "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "prompts": json.dumps(said),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LIST).exists():
        if read_json(folder / LIST, "--checkpoints") != facts:
            raise InputError(
                f"--checkpoints: {folder} has texts of another target, prompts or settings; choose another"
            )
    else:
        write_json(folder / LIST, facts)
    # At least eight files where there are as many prompts: whole files are held out.
    size = max(1, min(TOGETHER, len(prompts) // 8))
    parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    files = [folder / f"texts-{number:05d}.safetensors" for number in range(len(parts))]
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        progress(TASK, number, len(parts))
        if not file.exists():
            write_atomic(file, safetensors.torch.save(_written(pair, part, max_new_tokens, temperature, seed)))
    progress(TASK, len(parts), len(parts))
    return Texts(files)


@torch.inference_mode()
def _written(
    pair: Pair, part: Sequence[tuple[Prompt, list[int]]], most: int, temperature: float, seed: int
) -> dict[str, Tensor]:
    """Return what a file holds of some prompts."""
    ids = [ids for _, ids in part]
    keys = [stream_key(seed, prompt.stream_name) for prompt, _ in part]
    tokens, states, sizes = [], [], []
    for sampled in dict.fromkeys((0.0, temperature)):  # once where both are greedy
        made = plain_texts(pair, ids, keys, most, sampled)
        for prompt, text in zip(ids, made.tokens, strict=True):
            whole = [*prompt, *text]
            tokens += whole
            # Decoding keeps no states of the prompt, which fitting reads too: the text is read once more as a whole.
            states.append(_states(pair, whole))
            sizes.append([len(prompt), len(whole), int(sampled == 0.0)])
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "states": torch.cat(states),
        "sizes": torch.tensor(sizes, dtype=torch.int32),
    }


def _states(pair: Pair, text: Sequence[int]) -> Tensor:
    """Return [n, H] float16, the target's last hidden states of a text."""
    model = open_cache(pair.target, len(text), pair.vocabulary, True, device=pair.device, reading=pair.readings[0])
    model.read(upload([list(text)], pair.device), rows=1)
    assert model.states is not None
    return stored(model.states[0]).cpu()


class Texts:
    """Recorded texts by file, read when they are wanted.

    Args:
        files: of `record_texts`.
        shortest: tokens that a text has at least, prompt included; shorter ones are left out.
    """

    def __init__(self, files: Sequence[Path], shortest: int = 0) -> None:
        self.files, self.shortest = list(files), shortest

    def read(self, number: int) -> list[Text]:
        """Return the texts of a file that are long enough.

        Raises:
            InputError: it cannot be read.
        """
        path = self.files[number]
        try:
            held: dict[str, Any] = safetensors.torch.load_file(path)
            sizes = held["sizes"].tolist()
            lengths = [length for _, length, _ in sizes]
            tokens, states = held["tokens"].long().split(lengths), held["states"].float().split(lengths)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"--checkpoints: {path} cannot be read ({reason}); remove it and record it again"
            ) from None
        return [
            Text(text, prompt, bool(greedy), state)
            for text, state, (prompt, length, greedy) in zip(tokens, states, sizes, strict=True)
            if length >= self.shortest
        ]

    def __iter__(self) -> Iterator[Text]:
        for number in range(len(self.files)):
            yield from self.read(number)

    def divided(self, held_out: int) -> tuple[Texts, Texts]:
        """Return all but the last `held_out` files, and those."""
        return Texts(self.files[:-held_out], self.shortest), Texts(self.files[-held_out:], self.shortest)


@dataclass(frozen=True)
class Batch:
    """Texts side by side, filled up at their ends.

    Attributes:
        tokens: [B, n] int64.
        states: [B, n, H].
        length: [B] int64, of the texts.
    """

    tokens: Tensor
    states: Tensor
    length: Tensor

    @staticmethod
    def of(texts: Sequence[Text]) -> Batch:
        """Return some texts as a batch."""
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([text.tokens for text in texts], batch_first=True)
        states = pad([text.states for text in texts], batch_first=True)
        return Batch(tokens, states, torch.tensor([len(text.tokens) for text in texts]))
