"""One prompt, and its token ids, with or without the model's chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..policies.errors import InputError
from ..policies.text import HALF, is_text


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique among the prompts of a run; noise, split, order and shard hang on it.
        text: what is read.
        group: under which it is reported.
        completion: an answer that came with it, as text or as token ids, or None.
        system: the system message that came with it; used under a chat template only.
        templated: `text` is the result of a chat template and holds its special tokens.
    """

    id: str
    text: str
    group: str = ""
    completion: str | tuple[int, ...] | None = None
    system: str = ""
    templated: bool = False

    def __post_init__(self) -> None:
        for name in ("id", "text", "group", "completion", "system"):
            if not is_text(getattr(self, name)):
                raise InputError(f"--prompts: the {name} of prompt {self.id!a} has {HALF}")


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
    """Return the token ids of each prompt.

    Raises:
        InputError: there is no room, or a prompt has no token or more than `room`, what the models can read beside the new
            tokens.
    """
    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    if room < 1:
        raise InputError("--max-new-tokens: leaves no room for a prompt in what this pair can read; lower it")
    encoded = [list(tokenizer(p.text, add_special_tokens=not p.templated)["input_ids"]) for p in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= room:
            raise InputError(
                f"--prompts: prompt {prompt.id!r} has {len(ids)} tokens; expected 1 to {room} with this pair and "
                "--max-new-tokens"
            )
    return encoded
