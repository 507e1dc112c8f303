"""One prompt, and its token ids, with or without the model's chat template."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...policies.errors import InputError, SpecstopWarning, close_match
from ...policies.files import SURROGATE, is_text
from ..work import stream_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG = ("skip", "left", "right", "refuse")
"""What becomes of prompts that are too long."""

_NAMED = 5


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique among the prompts of a run, except for samples of the same prompt. Noise, order and shard depend on it.
        text: what is read.
        group: under which it is reported.
        completion: an answer that came with it, as text or as token ids, or None.
        system: the system message that came with it; used under a chat template only.
        templated: `text` is the result of a chat template and holds its special tokens.
        sample: name of the sample, "" if the prompt has one text. Samples of a prompt have the same id and text.
    """

    id: str
    text: str
    group: str = ""
    completion: str | tuple[int, ...] | None = None
    system: str = ""
    templated: bool = False
    sample: str = ""

    @property
    def stream_name(self) -> str:
        """Name that the random numbers of the text are keyed by; see `work.stream_name`."""
        return stream_name(self.id, self.sample)

    def __post_init__(self) -> None:
        for name in ("id", "text", "group", "completion", "system", "sample"):
            if not is_text(getattr(self, name)):
                raise InputError(f"--prompts: the {name} of prompt {self.id!a} has {SURROGATE}")


def apply_chat_template(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Return the prompts as the model's chat template writes them, up to where the answer begins.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses a prompt.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError("--chat: the tokenizer has no chat template; leave --chat out, or use a chat model")
    done = []
    for prompt in prompts:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = [*system, {"role": "user", "content": prompt.text}]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise whatever it likes
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"--chat: the chat template refuses prompt {prompt.id!r}: {line}") from None
        done.append(dataclasses.replace(prompt, text=str(text), templated=True))
    return done


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, room: int) -> list[list[int]]:
    """Return the token ids of each prompt; one that does not fit is refused, see `fit`."""
    return fit(prompts, tokenizer, room, "refuse")[1]


def fit(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, room: int, long: str = "skip"
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that the models can read, and the token ids of each.

    Args:
        prompts: to be read.
        tokenizer: of the pair.
        room: tokens of the longest prompt: what the models read, less the new tokens and the depth.
        long: what becomes of longer ones: "skip" leaves them out, "left" and "right" leave out tokens on that side, with
            a `SpecstopWarning` that counts them; "refuse" is an error.

    Raises:
        InputError: there is no room, a prompt has no token, or none is left.
    """
    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    if long not in LONG:
        raise InputError(f"--long: expected one of {', '.join(LONG)}, not {long!r}{close_match(long, LONG)}")
    if room < 1:
        raise InputError("--max-new-tokens: leaves no room for a prompt in what this pair can read; lower it")
    encoded = [list(tokenizer(p.text, add_special_tokens=not p.templated)["input_ids"]) for p in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise InputError(f"--prompts: prompt {prompt.id!r} has 0 tokens; expected 1 to {room}")
    from ...decode.run import warn_two_bos  # imports torch, which invalid prompts should not wait for

    warn_two_bos(encoded, tokenizer)
    longer = [f"{p.id!r} has {len(ids)}" for p, ids in zip(prompts, encoded, strict=True) if len(ids) > room]
    if not longer:
        return list(prompts), encoded
    named = ", ".join(longer[:_NAMED]) + (", ..." if len(longer) > _NAMED else "")
    text = f"{len(longer)} of {len(prompts)} prompts have more than {room} tokens ({named})"
    if long == "refuse" or (long == "skip" and len(longer) == len(prompts)):
        raise InputError(
            f"--prompts: {text}; that is what the pair reads, less --max-new-tokens and --depth. --long skip leaves such "
            "prompts out, left or right cuts them"
        )
    done = {"skip": "are left out", "left": "have lost their beginning", "right": "have lost their end"}[long]
    warnings.warn(f"{text} and {done} (--long)", SpecstopWarning, stacklevel=2)
    if long == "skip":
        kept = [(p, ids) for p, ids in zip(prompts, encoded, strict=True) if len(ids) <= room]
        return [p for p, _ in kept], [ids for _, ids in kept]
    return list(prompts), [ids[-room:] if long == "left" else ids[:room] for ids in encoded]
