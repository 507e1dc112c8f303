"""`decode`: prompts in, texts of the target out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from transformers import PreTrainedTokenizerBase

from ..policies.arguments import as_list
from ..policies.errors import InputError
from ..policies.host import with_costs
from ..policies.profile import Profile, load_profile
from ..policies.registry import PolicySpec, as_policy
from .drafters import with_drafter
from .loop import Request, Speculator
from .models.pair import Pair
from .prompts import Prompts, encode_prompts
from .records import Generation
from .settings import Settings
from .verify.conditions import warn_if_unmeasured, warn_if_untrained
from .verify.noise import stream_key


@overload
def decode(pair: Pair, prompts: str, policy: PolicySpec, **options: Any) -> Generation: ...
@overload
def decode(pair: Pair, prompts: Sequence[Any], policy: PolicySpec, **options: Any) -> list[Generation]: ...
def decode(  # type: ignore[misc]  # the overloads leave the options out: only the type of `prompts` matters
    pair: Pair,
    prompts: Prompts,
    policy: PolicySpec,
    *,
    settings: Settings | None = None,
    ids: Sequence[str] | None = None,
    seed: int = 0,
    profile: Profile | str | Path | None = None,
    drafter: str | Sequence[str] | None = None,
    batch: int = 1,
    on_text: Callable[[int, str], None] | None = None,
    on_end: Callable[[int], None] | None = None,
) -> Generation | list[Generation]:
    """Decode prompts with a policy. Under every lossless mode, texts have the target's distribution.

    Args:
        pair: with a tokenizer.
        prompts: see `Prompts`.
        policy: when to stop drafting: a policy, a spec such as `fixed:4`, or a policy folder.
        settings: temperature, limits, verification, tree, processors, stops.
        ids: name of each prompt, part of the key of its noise; default: see `encode_prompts`.
        seed: of the noise; without effect at temperature 0.
        profile: see `Speculator`.
        drafter: proposes the candidates (`find_drafters`); default: that of the pair. Several for a policy that routes.
        batch: number of texts decoded side by side; when one ends, the next begins. Under `match` and `point`, and at
            temperature 0, a text is the same in any batch, except for ties within rounding errors.
        on_text: called with (prompt number, new text) after each round, for streaming.
        on_end: called with the number of a prompt after its text has ended.

    Returns:
        The result of one text, or a list in the order of the prompts. The seconds of a batch are shared equally.

    Raises:
        InputError: a prompt is empty or too long, or a default of the model cannot be applied.
        PolicyError: no such policy.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise InputError("the pair has no tokenizer to read prompts with")
    encoded = encode_prompts(pair, prompts, ids)
    costs = None if profile is None else load_profile(profile)
    policy, drafter = with_costs(as_policy(policy), costs), "+".join(as_list(drafter or pair.drafter))
    pair = pair if drafter == pair.drafter else with_drafter(pair, drafter)
    settings = (settings or Settings()).for_pair(pair).for_policy(policy)
    warn_if_untrained(policy, settings, pair)
    warn_if_unmeasured(costs, [policy], settings, drafter)
    speculator = Speculator(pair, policy, settings, costs, batch=batch)
    requests = [Request(tokens, stream_key(seed, name)) for name, tokens in encoded]
    writer = _TextWriter(tokenizer, on_text, on_end)
    generations = speculator.run(requests, writer.write if on_text else None, writer.end)
    texts = [str(tokenizer.decode(list(one.tokens), skip_special_tokens=True)) for one in generations]
    results = [replace(one, text=text) for one, text in zip(generations, texts, strict=True)]
    return results[0] if isinstance(prompts, str) else results


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
