"""`decode`: prompts in, the target's text out, faster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from ..policies.arguments import as_list
from ..policies.errors import InputError, SpecstopWarning
from ..policies.host import with_costs
from ..policies.profile import Profile
from ..policies.registry import PolicySpec, as_policy
from .drafters import find_drafter, with_drafter
from .loop import Request, Speculator
from .models.pair import Pair
from .records import Generation
from .settings import Settings
from .verify.conditions import warn_if_unmeasured, warn_if_untrained
from .verify.noise import stream_key


def _is_prompt(prompt: object) -> bool:
    """Whether it is a text or a sequence of token ids; the values of bytes would be read as ids."""
    sequence = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping))
    return isinstance(prompt, str) or (sequence and getattr(prompt, "ndim", 1) == 1)


def decode(
    pair: Pair,
    prompts: str | Sequence[str | Sequence[int]],
    policy: PolicySpec,
    *,
    settings: Settings | None = None,
    ids: Sequence[str] | None = None,
    seed: int = 0,
    profile: Profile | None = None,
    drafter: str | None = None,
    batch: int = 1,
    on_text: Callable[[int, str], None] | None = None,
    on_end: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decode prompts with a policy; the text is the target's own under every lossless mode.

    Args:
        pair: with a tokenizer.
        prompts: texts, or their token ids; a text by itself is one prompt.
        policy: when to stop drafting: a policy, a spec such as `fixed:4`, or a policy folder.
        settings: temperature, limits, verification, tree, processors, stops.
        ids: one for each prompt, part of the key of their noise; by default their numbers.
        seed: the other part; without effect at temperature 0.
        profile: see `Speculator`.
        drafter: proposes the candidates (`find_drafter`); the pair's by default.
        batch: how many are decoded side by side; one that ends gives its place to the next. Under `match` and `point`, and
            at temperature 0, a text is the same in any batch (where two tokens are equally likely, rounding may decide);
            under the other lossless modes its distribution is.
        on_text: called with (prompt number, new text) after each round, for streaming.
        on_end: called with the number of a prompt whose text has ended.

    Returns:
        The texts in the order of the prompts; in a batch the seconds of each are its share.

    Raises:
        InputError: a prompt is empty or too long, or a default of the model cannot be applied.
        PolicyError: no such policy.
    """
    if pair.tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    prompts = as_list(prompts)
    for prompt in prompts:
        if not _is_prompt(prompt):
            raise InputError(
                f"prompts: expected texts or lists of token ids, not {prompt!r:.60}; pass [ids] for one prompt"
            )
    policy, drafter = with_costs(as_policy(policy), profile), drafter or pair.drafter
    settings = (settings or Settings()).for_pair(pair).for_policy(policy)
    warn_if_untrained(policy, settings, pair if drafter == pair.drafter else with_drafter(pair, drafter))
    warn_if_unmeasured(profile, [policy], settings, drafter)
    names = as_list(ids) if ids is not None else [str(i) for i in range(len(prompts))]
    if len(names) != len(prompts):
        raise InputError(f"ids: expected one for each of {len(prompts)} prompts, not {len(names)}")
    speculator = Speculator(pair, policy, settings, profile, drafter=find_drafter(drafter, pair), batch=batch)
    read = pair.tokenizer
    requests = [
        Request(list(read(prompt)["input_ids"] if isinstance(prompt, str) else prompt), stream_key(seed, name))
        for name, prompt in zip(names, prompts, strict=True)
    ]
    warn_two_bos(
        [list(one.prompt) for one, prompt in zip(requests, prompts, strict=True) if isinstance(prompt, str)], read
    )
    streams = [_TextStream(pair, number, on_text) for number in range(len(requests))] if on_text else []

    def end(number: int, generation: Generation, stream: int) -> None:
        if streams:
            streams[number].end()
        if on_end:
            on_end(number)

    made = speculator.run(requests, (lambda number, new: streams[number].push(new)) if on_text else None, end)
    texts = [str(read.decode(list(one.tokens), skip_special_tokens=True)) for one in made]
    return [replace(one, text=text) for one, text in zip(made, texts, strict=True)]


def warn_two_bos(encoded: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn about prompts that begin with two BOS tokens."""
    bos = tokenizer.bos_token_id
    count = sum(bos is not None and ids[:2] == [bos, bos] for ids in encoded)
    if count:
        warnings.warn(
            f"{count} of {len(encoded)} prompts begin with two {tokenizer.bos_token} tokens, one of their text and one that "
            "the tokenizer adds; leave it out of the prompts, or give messages with --chat",
            SpecstopWarning,
            stacklevel=3,
        )


class _TextStream:
    """Turns tokens into text as they come; a character whose bytes are not complete yet waits."""

    def __init__(self, pair: Pair, number: int, write: Callable[[int, str], None]) -> None:
        self._pair, self._number, self._write = pair, number, write
        self._tokens: list[int] = []
        self._written = 0

    def push(self, tokens: list[int]) -> None:
        self._tokens.extend(tokens)
        self._flush(whole=False)

    def end(self) -> None:
        self._flush(whole=True)

    def _flush(self, whole: bool) -> None:
        assert self._pair.tokenizer is not None
        # As a whole: what a token adds to the text depends on those before it.
        text = str(self._pair.tokenizer.decode(self._tokens, skip_special_tokens=True))
        ready = len(text) if whole else len(text.rstrip("\ufffd"))
        if ready > self._written:
            self._write(self._number, text[self._written : ready])
            self._written = ready
