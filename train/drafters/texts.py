"""Texts and hidden states of the target, recorded once and read from disk while a drafter is fitted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

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

SETTINGS = "texts.json"

PROMPTS_PER_FILE = 16
"""Maximum of prompts that are decoded side by side; their texts make a file."""

TASK = "texts of the target"

Item = tuple[Prompt, list[int]]
"""A prompt and its token ids."""


class Text(NamedTuple):
    """A text, the prompt first: tokens [n] int64, and the target's last hidden states of them [n, H] float32."""

    tokens: Tensor
    states: Tensor


class Batch(NamedTuple):
    """Texts side by side, padded at their ends: tokens [B, n] int64, states [B, n, H], lengths of the texts [B] int64."""

    tokens: Tensor
    states: Tensor
    length: Tensor

    @staticmethod
    def of(texts: Sequence[Text]) -> Batch:
        """Return texts as a batch."""
        tokens, states = (pad_sequence(list(column), batch_first=True) for column in zip(*texts, strict=True))
        return Batch(tokens, states, torch.tensor([len(text.tokens) for text in texts]))


class Texts(Dataset[Text]):
    """Recorded texts; each is read from its file when it is used.

    Args:
        files: of `record_texts`.
        shortest: minimum of tokens, prompt included; shorter texts are left out.

    Raises:
        InputError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path], shortest: int = 0) -> None:
        self.files = list(files)
        self.index: list[tuple[Path, int, int]] = []  # file, first row, end
        for path in self.files:
            try:
                with safe_open(path, "pt") as file:
                    ends = [0, *file.get_tensor("sizes").cumsum(0).tolist()]
            except (OSError, SafetensorError) as error:
                reason = " ".join(str(error).split())[:200]
                raise InputError(
                    f"--checkpoints: {path} cannot be read ({reason}); remove it and record it again"
                ) from None
            self.index += [(path, *span) for span in itertools.pairwise(ends) if span[1] - span[0] >= shortest]

    def __len__(self) -> int:
        return len(self.index)

    def frequent_tokens(self, count: int, vocabulary: int) -> Tensor:
        """Return [count] int64, the most frequent tokens of all files, in ascending order."""
        times = torch.zeros(vocabulary, dtype=torch.int64)
        for path in self.files:
            with safe_open(path, "pt") as file:
                times += torch.bincount(file.get_tensor("tokens"), minlength=vocabulary)
        return times.argsort(descending=True, stable=True)[:count].sort().values

    def __getitem__(self, number: int) -> Text:
        path, start, end = self.index[number]
        with safe_open(path, "pt") as file:
            tokens, states = (file.get_slice(name)[start:end] for name in ("tokens", "states"))
        return Text(tokens.long(), states.float())


def prompts_by_file(prompts: Sequence[Item]) -> list[Sequence[Item]]:
    """Return the prompts in groups, one for each file of texts."""
    # At least eight files if there are as many prompts, because whole files are held out.
    size = max(1, min(PROMPTS_PER_FILE, len(prompts) // 8))
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def record_texts(
    pair: Pair,
    prompts: Sequence[Item],
    folder: Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    progress: Progress = silent,
) -> Texts:
    """Decode every prompt greedily and at a temperature, and keep texts and states; existing files are used again.

    Args:
        pair: has the target.
        prompts: with their token ids.
        folder: for the files, one per group of prompts; each is written whole.
        max_new_tokens: limit of each text.
        temperature: of the sampled texts; 0 = greedy ones only.
        seed: of the sampling.
        progress: see `Progress`.

    Raises:
        InputError: the folder holds texts of another run.
    """
    ids = [[prompt.id, prompt.sample, tokens] for prompt, tokens in prompts]
    settings = {
        "target": pair.fingerprint["target"], "dtype": str(pair.target.dtype), "max_new_tokens": max_new_tokens,
        "temperature": temperature, "seed": seed, "prompts": json.dumps(ids),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS).exists():
        write_json(folder / SETTINGS, settings)
    elif read_json(folder / SETTINGS, "--checkpoints") != settings:
        raise InputError(f"--checkpoints: {folder} has texts of another target, prompts or settings; choose another")
    parts = prompts_by_file(prompts)
    files = [folder / f"texts-{number:05d}.safetensors" for number in range(len(parts))]
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        progress(TASK, number, len(parts))
        if not file.exists():
            write_atomic(file, safetensors.torch.save(_record(pair, part, max_new_tokens, temperature, seed)))
    progress(TASK, len(parts), len(parts))
    return Texts(files)


@torch.inference_mode()
def _record(pair: Pair, part: Sequence[Item], max_new_tokens: int, temperature: float, seed: int) -> dict[str, Tensor]:
    """Return the tensors of a file: `tokens` [T] and `states` [T, H] of all texts, one after the other, and their `sizes`."""
    ids = [ids for _, ids in part]
    keys = [stream_key(seed, prompt.stream_name) for prompt, _ in part]
    tokens, states, sizes = [], [], []
    for text_temperature in dict.fromkeys((0.0, temperature)):  # once if both are greedy
        texts = plain_texts(pair, ids, keys, max_new_tokens, text_temperature).tokens
        for prompt, text in zip(ids, texts, strict=True):
            whole = [*prompt, *text]
            tokens += whole
            # Decoding keeps no states of the prompt, which fitting reads too, so the whole text is read again.
            states.append(_states(pair, whole))
            sizes.append(len(whole))
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
