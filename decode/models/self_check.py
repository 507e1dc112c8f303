"""Check, before a model decodes, that reading a text through our cache gives the logits of the library.

The check reads a few tokens with each kind of call that the loop uses: a chain with a roll-back, a tree, and two texts in one
call. It compares the logits with those of a forward pass of the library without a cache. No list of classes is needed.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies.errors import PairError, SpecstopWarning
from ..topology import from_widths
from .attention import LayerMasks, Part, TreeRows, split
from .cache import CachedModel, logit_difference
from .placement import is_plain, is_quantised, modified_module
from .view import Reading, long_rope, open_view, readable, scored_tokens, state_key

ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Tolerance for rounding: RMS difference of logits divided by their standard deviation over the vocabulary."""

_CAUSAL = 0.2
"""Upper bound of the effect of quantised activations on logits. A larger difference means that later tokens are visible."""

_PREFIX, _OTHER, _MORE = 5, 3, 9  # prompt lengths of the two texts, and length of the continuation of the first
_LONGEST_WINDOW = 1024  # largest `window_size` for which the first text is made longer than the window

_RESULTS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, Reading]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # threads may share a model; only one of them checks it


def check_model(role: str, model: PreTrainedModel) -> Reading:
    """Return the kinds of calls that a model supports. The result is cached until its configuration or adapters change.

    Args:
        role: `target` or `draft`, for messages.
        model: Model to check. Its mode and the random state of torch are not changed.

    Raises:
        PairError: The logits of a chain read through the cache differ from those of the library's forward pass.
    """
    key = state_key(model)
    with _LOCK:
        if model not in _RESULTS or _RESULTS[model][0] != key:
            _RESULTS[model] = key, _check(role, model)
        return _RESULTS[model][1]


def _check(role: str, model: PreTrainedModel) -> Reading:
    # A compact engine has no reference forward pass. Weights offloaded to disk would be loaded again for every call.
    if not hasattr(model, "prepare_inputs_for_generation") or any(p.is_meta for p in model.parameters()):
        return Reading()
    view, guard = open_view(model)  # does not modify the model
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), guard(), torch.random.fork_rng(devices):
        try:
            ids = _choose_tokens(model)
            return Reading() if ids is None else _Check(view, ids).run(role, model)
        except Exception as error:  # the type of the error depends on the class
            text = str(error).strip().split("\n")[0][:160]
            why = text if isinstance(error, PairError) else f"{type(error).__name__}: {text}"
            raise PairError(
                f"the {role} is a {type(model).__name__}, which cannot be decoded here: {why}; choose a decoder with a "
                "cache of keys and values"
            ) from None


def _choose_tokens(model: PreTrainedModel) -> tuple[list[int], list[int], list[int]] | None:
    """Return two texts, and tokens unlike the continuation of the first; None if the limits of the model are too small."""
    window = getattr(model.config.get_text_config(), "window_size", None)
    prefix = window + 2 if isinstance(window, int) and _PREFIX < window <= _LONGEST_WINDOW else _PREFIX
    count, rope = prefix + _MORE, long_rope(model)
    special = _special_tokens(model.config.to_dict())
    pool = [token for token in range(min(scored_tokens(model), 512)) if token not in special]
    if len(pool) < 4 or readable(model) < count or (rope is not None and rope.original < count):
        return None
    ids = [pool[(7 * at * at + 3 * at + at // 3) % len(pool)] for at in range(count + _OTHER + 2)]
    unlike = [pool[(pool.index(token) + 1) % len(pool)] for token in ids[prefix:count]]
    return ids[:count], ids[count:], unlike


class _Check:
    """Two texts, their logits in a forward pass of the library, and what else influences the logits."""

    def __init__(self, view: PreTrainedModel, ids: tuple[list[int], list[int], list[int]]) -> None:
        *self.texts, self.unlike = ids
        self.rows = [_plain_logits(view, text) for text in self.texts]  # [n, V] of each text
        self.start = len(ids[0]) - _MORE  # length of the prompt of the first text
        self.is_finite = all(map(_is_finite, self.rows))
        self.tolerance = ROUNDING.get(view.dtype, 0.2)
        if self.is_finite:
            # Difference of the last logits of the prompt between the prompt alone and the whole text.
            alone = _plain_logits(view, self.texts[0][: self.start])[-1:]
            self.drift = logit_difference(alone, self.rows[0][self.start - 1 : self.start])
            last = _plain_logits(view, self.texts[0][:2] + self.texts[1], padding=2)[-1:]
            # In some dtypes the library returns NaN for padded texts, which no text can be compared with.
            limit = max(self.tolerance, 3 * self.drift)
            self.padded = not _is_finite(last) or logit_difference(last, self.rows[1][-1:]) <= limit

    def run(self, role: str, model: PreTrainedModel) -> Reading:
        """Return the kinds of calls that give the expected logits. Raises any error if a chain is not among them."""
        if not self.is_finite:
            return Reading()  # decoding reports a broken model
        is_rounded = is_quantised(model.config) or modified_module(model) or not all(map(is_plain, model.parameters()))
        if self.drift > (_CAUSAL if is_rounded else self.tolerance):
            raise PairError("the logits of a token depend on the tokens after it (an encoder without is_decoder=True?)")
        try:
            reading = self._read(model, Reading())
        except Exception as error:
            # Without our masks, layers with a window need the library's own cache, which drops tokens outside the window.
            if LayerMasks.of(model) is not None:
                raise
            try:
                reading = self._read(model, Reading(masked=False))
            except Exception:
                raise error from None
        if self.drift > self.tolerance:
            warnings.warn(
                f"the logits of the {role}, a {type(model).__name__}, depend on how many tokens a call reads (by "
                f"{self.drift:.1%} of their spread, as with dynamic scales of quantised activations): texts may differ with "
                "the draft length",
                SpecstopWarning,
                stacklevel=5,
            )
        return reading

    def _read(self, model: PreTrainedModel, reading: Reading) -> Reading:
        cache = CachedModel(model, len(self.texts[0]) + 4, self.rows[0].shape[-1], streams=2, reading=reading)
        if not self._chain(cache):
            raise PairError("a text read through a cache gets other logits than as a whole (an encoder?)")
        if not reading.masked:
            return Reading(masked=False, tree=False, side_by_side=False, padded=self.padded)
        start, results = self.start + 5, []
        for method in (self._tree, self._batch):
            try:
                results.append(method(cache, start))
            except Exception:  # an unsupported call may raise any error
                results.append(False)
            cache.roll_back(start)
        # Masks that do not separate texts may not hide padding in later calls either (GIT).
        return Reading(tree=results[0], side_by_side=results[1], padded=self.padded and results[1])

    def _agree(self, rows: Tensor, end: int, text: int = 0) -> bool:
        """Whether logits [n, V] are those of the n tokens of a text before `end`."""
        expected = self.rows[text][end - len(rows) : end]
        return logit_difference(rows, expected) <= max(self.tolerance, min(3 * self.drift, _CAUSAL))

    def _reads(self, cache: CachedModel, *spans: tuple[int, int, int], rows: int = 0) -> bool:
        """Whether a call that reads spans (text, first, end) gives the expected logits of their last `rows`, 0 = all."""
        parts = [Part(text, self.texts[text][first:end], rows) for text, first, end in spans]
        logits, bounds = cache.read_parts(parts), split(parts)
        return all(
            self._agree(logits[begin:stop], end, text)
            for (text, _, end), begin, stop in zip(spans, bounds[:-1], bounds[1:], strict=True)
        )

    def _chain(self, cache: CachedModel) -> bool:
        """Whether a prompt, one token, three tokens of which two are rolled back, and three more have the right logits."""
        start = self.start
        agree = self._reads(cache, (0, 0, start), rows=1) and self._reads(cache, (0, start, start + 1))
        tree = TreeRows(from_widths((1, 1)), start + 1, [], [0, 1, 2]) if cache.masked else None
        rows = cache.read_parts([Part(0, [self.texts[0][start + 1], *self.unlike[2:4]], tree=tree)])
        agree = agree and self._agree(rows[:1], start + 2)
        cache.roll_back(start + 2)
        return agree and self._reads(cache, (0, start + 2, start + 5))

    def _tree(self, cache: CachedModel, start: int) -> bool:
        """Whether the second branch of a tree, and a token after it, have the expected logits."""
        text, at = self.texts[0], start - self.start
        tree = from_widths((2, 1))  # rows: the root, its children, their children
        tokens = [text[start], self.unlike[at + 1], text[start + 1], self.unlike[at + 2], text[start + 2]]
        rows = cache.read_parts([Part(0, tokens, tree=TreeRows(tree, start, [], list(range(5))))])
        cache.keep(start, [start, start + 2, start + 4])
        return self._agree(rows[[0, 2, 4]], start + 3) and self._reads(cache, (0, start + 3, start + 4))

    def _batch(self, cache: CachedModel, start: int) -> bool:
        """Whether both texts have the expected logits if calls read different numbers of tokens of each."""
        cache.read_parts([Part(1, self.texts[1][:_OTHER], 1)])
        return self._reads(cache, (1, _OTHER, _OTHER + 1), (0, start, start + 3)) and self._reads(
            cache, (0, start + 3, start + 4), (1, _OTHER + 1, _OTHER + 2)
        )


def _special_tokens(config: dict[str, Any]) -> set[int]:
    """Return the special token ids of a configuration, such as image, padding and end-of-sequence tokens."""
    ids: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            ids |= _special_tokens(value)
        elif str(name).endswith(("token_id", "token_index", "token_ids")):
            ids.update(item for item in (value if isinstance(value, list | tuple) else [value]) if type(item) is int)
    return ids


def _plain_logits(model: PreTrainedModel, text: list[int], padding: int = 0) -> Tensor:
    """Return the logits [n, V] of n tokens, of which `padding` are masked, as in `generate` without a cache."""
    ids = torch.tensor([text], device=model.device)
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


def _is_finite(rows: Tensor) -> bool:
    """Whether the best score of each row is finite."""
    return bool(rows.amax(-1).isfinite().all())
