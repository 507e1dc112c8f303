"""Check, before a model decodes, that reading a text through our cache gives the logits of the library.

The check reads a few tokens with each kind of call that the loop uses: a chain with a roll-back, a tree, and two texts in one
call. It compares the logits with those of a forward pass of the library without a cache. No list of classes is needed.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PairError, SpecstopWarning
from ..topology import from_widths
from .adapters import modified_module
from .cache import CachedModel
from .kv_cache import scored_tokens
from .long_rope import long_rope, readable
from .packed import Part, TreeRows, split
from .placement import is_plain, is_quantised
from .reading.layer_masks import LayerMasks
from .view import Reading, open_view

ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Tolerance for rounding: RMS difference of logits divided by their standard deviation over the vocabulary."""

_CAUSAL = 0.2
"""Upper bound of the effect of quantised activations on logits. A larger difference means that later tokens are visible."""

_PREFIX, _OTHER, _MORE = 5, 3, 9  # prompt lengths of the two texts, and length of the continuation of the first
_LONGEST_WINDOW = 1024  # largest `window_size` for which the first text is made longer than the window

_RESULTS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Reading]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # threads may share a model; only one of them checks it


class _Differs(Exception):
    """The logits differ from those of the library. The message names the call."""


def check_model(role: str, model: PreTrainedModel) -> Reading:
    """Return the kinds of calls that a model supports. The result is cached until its configuration or adapters change.

    Args:
        role: `target` or `draft`, for messages.
        model: Model to check. Its mode and the random state of torch are not changed.

    Raises:
        PairError: The logits of a chain read through the cache differ from those of the library's forward pass.
    """
    adapters = getattr(model, "active_adapter", None) or getattr(model, "_hf_peft_config_loaded", None)
    config = model.config
    key = str(adapters), model.dtype, model.device, config._attn_implementation, repr(config.to_dict())
    with _LOCK:
        if model not in _RESULTS or _RESULTS[model][0] != key:
            _RESULTS[model] = key, _check(role, model)
        return _RESULTS[model][1]


def _check(role: str, model: PreTrainedModel) -> Reading:
    # A compact engine has no reference forward pass. Weights offloaded to disk would be loaded again for every call.
    if not hasattr(model, "prepare_inputs_for_generation") or any(p.is_meta for p in model.parameters()):
        return Reading()
    view, guard = open_view(model)  # does not modify the model
    name, reasons = f"the {role}, a {type(model).__name__},", []
    with torch.no_grad(), guard, torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        try:
            texts = _Texts.of(view)
            if texts is None:
                return Reading()
            weights = map(is_plain, model.parameters())
            is_rounded = is_quantised(model.config) or modified_module(model) or not all(weights)
            if texts.drift > (_CAUSAL if is_rounded else texts.tolerance):
                raise _Differs(
                    "the logits of a token depend on the tokens after it (an encoder without is_decoder=True?)"
                )
        except Exception as error:  # the type of the error depends on the class
            raise _refusal(role, model, error) from None
        # Without our masks, layers with a window need the library's own cache, which drops tokens outside the window.
        for masked in (True, False) if LayerMasks.of(model) is None else (True,):
            try:
                reading = texts.read(model, Reading(masked=masked))
            except Exception as error:
                reasons.append(error)
                continue
            if texts.drift > texts.tolerance:
                warnings.warn(
                    f"the logits of {name} depend on how many tokens a call reads (by {texts.drift:.1%} of their spread, as "
                    "with dynamic scales of quantised activations): texts may differ with the draft length",
                    SpecstopWarning,
                    stacklevel=4,
                )
            return reading
    raise _refusal(role, model, reasons[0])


def _refusal(role: str, model: PreTrainedModel, error: Exception) -> PairError:
    text = str(error).strip().split("\n")[0][:160]
    why = text if isinstance(error, _Differs) else f"{type(error).__name__}: {text}"
    return PairError(
        f"the {role} is a {type(model).__name__}, which cannot be decoded here: {why}; choose a decoder whose cache is a "
        "list of keys and values"
    )


@dataclass
class _Texts:
    """Two texts and their logits in a forward pass of the library."""

    first: Tensor  # [1, n]; the prompt is all but the last `_MORE`
    second: Tensor  # [1, n]
    unlike: list[int]  # tokens that differ from the continuation of `first` at each position
    rows: tuple[Tensor, Tensor]  # [n, V] logits of each text
    drift: float  # difference of the last logits of the prompt between the prompt alone and the whole text
    tolerance: float  # largest difference that counts as rounding
    padded: bool  # whether masked padding on the left leaves the last logits as they are

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Texts | None:
        """Return the texts for a model; None if its limits are too small or its logits are not finite."""
        config = model.config.get_text_config()
        window = getattr(config, "window_size", None)
        prefix = window + 2 if isinstance(window, int) and _PREFIX < window <= _LONGEST_WINDOW else _PREFIX
        count, rope = prefix + _MORE, long_rope(model)
        special = _special_tokens(model.config.to_dict())
        pool = [token for token in range(min(scored_tokens(model), 512)) if token not in special]
        if len(pool) < 4 or readable(model) < count or (rope is not None and rope.original < count):
            return None
        ids = [pool[(7 * at * at + 3 * at + at // 3) % len(pool)] for at in range(count + _OTHER + 2)]
        unlike = [pool[(pool.index(token) + 1) % len(pool)] for token in ids[prefix:count]]
        first, second = (torch.tensor([tokens], device=model.device) for tokens in (ids[:count], ids[count:]))
        rows = _plain_logits(model, first), _plain_logits(model, second)
        if not all(bool(logits.amax(-1).isfinite().all()) for logits in rows):
            return None  # decoding reports a broken model
        drift = _gap(_plain_logits(model, first[:, :prefix])[-1:], rows[0][prefix - 1 : prefix])
        tolerance = ROUNDING.get(model.dtype, 0.2)
        last = _plain_logits(model, torch.cat([first[:, :2], second], 1), padding=2)[-1:]
        # In some dtypes the library returns NaN for padded texts, which no text can be compared with.
        padded = not bool(last.amax(-1).isfinite().all()) or _gap(last, rows[1][-1:]) <= max(tolerance, 3 * drift)
        return cls(first, second, unlike, rows, drift, tolerance, padded)

    def read(self, model: PreTrainedModel, reading: Reading) -> Reading:
        """Return the kinds of calls that give the expected logits. Raises `_Differs` if those of a chain differ."""
        count = self.first.shape[1]
        cache = CachedModel(model, count + 4, self.rows[0].shape[-1], streams=2, reading=reading)
        self._chain(cache, count - _MORE)
        if not reading.masked:
            return Reading(masked=False, tree=False, side_by_side=False, padded=self.padded)
        start, results = count - _MORE + 5, []
        for method in (self._tree, self._batch):
            try:
                results.append(method(cache, start))
            except Exception:  # an unsupported call may raise any error
                results.append(False)
            cache.roll_back(start)
        # Masks that do not separate texts may not hide padding in later calls either (GIT).
        return Reading(tree=results[0], side_by_side=results[1], padded=self.padded and results[1])

    def _chain(self, cache: CachedModel, start: int) -> None:
        """Read the prompt, one token, three tokens of which two are rolled back, and then three more."""

        def check(what: str, rows: Tensor, end: int) -> None:
            if not self._agree(rows, end):
                raise _Differs(f"read through a cache, {what} got other logits than in the text as a whole")

        first = self.first
        check("its prompt", cache.read(first[:, :start], 1)[0], start)
        if not cache.is_used:
            raise _Differs("it does not use its cache (an encoder without is_decoder=True?)")
        check("one token after others", cache.read(first[:, start : start + 1])[0], start + 1)
        unlike = torch.tensor([self.unlike[2:4]], device=first.device)
        rows = cache.read(torch.cat([first[:, start + 1 : start + 2], unlike], 1))[0]
        check("several tokens", rows[:1], start + 2)
        cache.roll_back(start + 2)
        check("tokens after a roll-back", cache.read(first[:, start + 2 : start + 5])[0], start + 5)

    def _agree(self, rows: Tensor, end: int, text: int = 0) -> bool:
        """Whether logits [n, V] are those of the n tokens of a text before `end`."""
        expected = self.rows[text][end - len(rows) : end]
        return _gap(rows, expected) <= max(self.tolerance, min(3 * self.drift, _CAUSAL))

    def _tree(self, cache: CachedModel, start: int) -> bool:
        """Return whether the second branch of a tree, and a token after it, have the expected logits."""
        first, at = self.first[0].tolist(), start - self.first.shape[1] + _MORE
        tree = from_widths((2, 1))  # rows: the root, its children, their children
        tokens = [first[start], self.unlike[at + 1], first[start + 1], self.unlike[at + 2], first[start + 2]]
        rows = cache.read_tree(tokens, TreeRows(tree, start, [], list(range(5))))[0]
        cache.keep(start, [start, start + 2, start + 4])
        after = cache.read(self.first[:, start + 3 : start + 4])[0]
        return self._agree(rows[[0, 2, 4]], start + 3) and self._agree(after, start + 4)

    def _batch(self, cache: CachedModel, start: int) -> bool:
        """Return whether both texts have the expected logits if calls read different numbers of tokens of each."""
        cache.read(self.second[:, :_OTHER], 1, stream=1)
        first, second = self.first[0].tolist(), self.second[0].tolist()
        for parts, ends in (
            ([Part(1, second[_OTHER : _OTHER + 1]), Part(0, first[start : start + 3])], (_OTHER + 1, start + 3)),
            ([Part(0, first[start + 3 : start + 4]), Part(1, second[_OTHER + 1 :])], (start + 4, _OTHER + 2)),
        ):
            logits, bounds = cache.read_parts(parts), split(parts)
            for part, begin, stop, end in zip(parts, bounds[:-1], bounds[1:], ends, strict=True):
                if not self._agree(logits[begin:stop], end, part.stream):
                    return False
        return True


def _special_tokens(config: dict[str, Any]) -> set[int]:
    """Return the special token ids of a configuration, such as image, padding and end-of-sequence tokens."""
    ids: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            ids |= _special_tokens(value)
        elif str(name).endswith(("token_id", "token_index", "token_ids")):
            ids.update(item for item in (value if isinstance(value, list | tuple) else [value]) if type(item) is int)
    return ids


def _plain_logits(model: PreTrainedModel, ids: Tensor, padding: int = 0) -> Tensor:
    """Return the logits [n, V] of a text [1, n], `padding` tokens of it masked, as in `generate` without a cache."""
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": False, "is_first_iteration": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    library: Any = type(model)
    # Call the method of the class: PEFT replaces that of the instance to insert soft prompts, which the prefill handles.
    prepared = library.prepare_inputs_for_generation(model, ids, **inputs)
    logits: Tensor = model(**{name: value for name, value in prepared.items() if value is not None}).logits[0]
    return logits


def _gap(rows: Tensor, expected: Tensor) -> float:
    """Return the RMS difference of logits [n, V] over the standard deviation of the expected ones, the maximum over rows."""
    width = min(rows.shape[-1], expected.shape[-1])
    a, b = rows[..., :width].double(), expected[..., :width].double()
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return torch.inf
    difference = torch.where(finite, a - b, 0.0).square().mean(-1).sqrt()
    spread = torch.where(finite, b, 0.0).std(-1, correction=0).clamp_min(1e-9 * float(b[finite].abs().max()) + 1e-30)
    return float((difference / spread).max())
