"""`decode`: prompts in, texts of the target out."""

from __future__ import annotations

import warnings
from collections import defaultdict
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
    """Decode prompts with a policy. Under every lossless mode, texts have the target's distribution.

    Args:
        pair: with a tokenizer.
        prompts: texts or their token ids, or one text.
        policy: when to stop drafting: a policy, a spec such as `fixed:4`, or a policy folder.
        settings: temperature, limits, verification, tree, processors, stops.
        ids: name of each prompt, part of the key of its noise; default: its index.
        seed: of the noise; without effect at temperature 0.
        profile: see `Speculator`.
        drafter: proposes the candidates (`find_drafter`); default: that of the pair.
        batch: number of texts decoded side by side; when one ends, the next begins. Under `match` and `point`, and at
            temperature 0, a text is the same in any batch, except for ties within rounding errors.
        on_text: called with (prompt number, new text) after each round, for streaming.
        on_end: called with the number of a prompt after its text has ended.

    Returns:
        The texts in the order of the prompts. The seconds of a batch are shared equally.

    Raises:
        InputError: a prompt is empty or too long, or a default of the model cannot be applied.
        PolicyError: no such policy.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    prompts = as_list(prompts)
    for prompt in prompts:
        _check_prompt(prompt)
    names = as_list(ids) if ids is not None else [str(i) for i in range(len(prompts))]
    if len(names) != len(prompts):
        raise InputError(f"ids: expected one for each of {len(prompts)} prompts, not {len(names)}")
    policy, drafter = with_costs(as_policy(policy), profile), drafter or pair.drafter
    settings = (settings or Settings()).for_pair(pair).for_policy(policy)
    warn_if_untrained(policy, settings, pair if drafter == pair.drafter else with_drafter(pair, drafter))
    warn_if_unmeasured(profile, [policy], settings, drafter)
    speculator = Speculator(pair, policy, settings, profile, drafter=find_drafter(drafter, pair), batch=batch)
    encoded = [list(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt) for prompt in prompts]
    warn_two_bos([row for row, prompt in zip(encoded, prompts, strict=True) if isinstance(prompt, str)], tokenizer)
    requests = [Request(tokens, stream_key(seed, name)) for tokens, name in zip(encoded, names, strict=True)]
    writer = _TextWriter(tokenizer, on_text, on_end)
    generations = speculator.run(requests, writer.write if on_text else None, writer.end)
    texts = [str(tokenizer.decode(list(one.tokens), skip_special_tokens=True)) for one in generations]
    return [replace(one, text=text) for one, text in zip(generations, texts, strict=True)]


class _TextWriter:
    """Streams texts: passes the text of new tokens, with the number of the prompt, to the callbacks of `decode`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_text: Callable[[int, str], None] | None,
        on_end: Callable[[int], None] | None,
    ) -> None:
        self._tokenizer, self._on_text, self._on_end = tokenizer, on_text, on_end
        self._tokens, self._written = defaultdict[int, list[int]](list), defaultdict[int, str](str)

    def write(self, number: int, new: Sequence[int], is_complete: bool = False) -> None:
        """Write the text of new tokens. Incomplete characters wait until the text `is_complete`."""
        if self._on_text is None:
            return
        self._tokens[number] += new
        # All tokens are decoded again, as the text of a token depends on those before it.
        text = str(self._tokenizer.decode(self._tokens[number], skip_special_tokens=True))
        text = text if is_complete else text.rstrip("\ufffd")
        written = self._written[number]
        if len(text) > len(written):
            self._on_text(number, text[len(written) :])
            self._written[number] = text

    def end(self, number: int, generation: Generation, stream: int) -> None:
        """Write the rest of a text that has ended."""
        self.write(number, (), is_complete=True)
        if self._on_end:
            self._on_end(number)


def _check_prompt(prompt: object) -> None:
    """Raise `InputError` unless a prompt is a text or a sequence of token ids; bytes would be read as ids."""
    is_sequence = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping))
    if not isinstance(prompt, str) and not (is_sequence and getattr(prompt, "ndim", 1) == 1):
        raise InputError(
            f"prompts: expected texts or lists of token ids, not {prompt!r:.60}; pass [ids] for one prompt"
        )


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
