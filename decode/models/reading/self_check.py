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

from ....policies.errors import PairError, SpecstopWarning
from ...topology import from_widths
from ..cache import CachedModel, scored_tokens
from ..masks import LayerMasks
from ..packing import Part, TreeRows
from ..placement import is_plain
from ..view import open_view
from .modes import Reading, readable
from .ropes import length_rope

ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Tolerance for rounding: RMS difference of logits divided by their standard deviation over the vocabulary."""

_CAUSAL = 0.2
"""Upper bound of the effect of quantised activations on logits. A larger difference means that later tokens are visible."""

_UNROUNDED = ("torch.nn.", "transformers.models.", "transformers.activations", "transformers.pytorch_utils")
"""Packages of modules that do not quantise activations."""

_PREFIX, _OTHER, _MORE = 5, 3, 9
"""Prompt lengths of the first and the second text, and length of the continuation of the first."""

_LONGEST_WINDOW = 1024
"""Largest `window_size` for which the first text is made longer than the window."""

_RESULTS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Reading]] = weakref.WeakKeyDictionary()

_LOCK = threading.Lock()
"""Threads may share a model. Only one of them checks it."""


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
    key = _key(model)
    with _LOCK:
        result = _RESULTS.get(model)
        if result is None or result[0] != key:
            result = _RESULTS[model] = key, _check(role, model)
        return result[1]


def _key(model: PreTrainedModel) -> object:
    adapters = getattr(model, "active_adapter", None) or getattr(model, "_hf_peft_config_loaded", None)
    return str(adapters), model.dtype, model.device, model.config._attn_implementation, repr(model.config.to_dict())


def _check(role: str, model: PreTrainedModel) -> Reading:
    # A compact engine has no reference forward pass. Weights offloaded to disk would be loaded again for every call.
    if not hasattr(model, "prepare_inputs_for_generation") or any(p.is_meta for p in model.parameters()):
        return Reading()
    view, guard = open_view(model)  # does not modify the model
    with torch.no_grad(), guard, torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        try:
            texts = _Texts.of(view)
        except Exception as error:  # the type of the error depends on the class
            raise _refusal(role, model, f"its forward without a cache fails: {_short(error)}") from None
        if texts is None:
            return Reading()
        if texts.drift > (texts.tolerance if _is_unrounded(model) else _CAUSAL):
            why = "the logits of a token depend on the tokens after it (an encoder without is_decoder=True?)"
            raise _refusal(role, model, why)
        reasons = []
        # Without our masks, layers with a window need the library's own cache, which drops tokens outside the window.
        for masked in (True, False) if LayerMasks.of(model) is None else (True,):
            try:
                reading = texts.read(model, Reading(masked=masked))
            except Exception as error:
                reasons.append(_short(error))
                continue
            if texts.drift > texts.tolerance:
                warnings.warn(
                    f"the logits of the {role}, a {type(model).__name__}, depend on how many tokens a call reads (by "
                    f"{texts.drift:.1%} of their spread, as with dynamic scales of quantised activations): texts may "
                    "differ with the draft length",
                    SpecstopWarning,
                    stacklevel=4,
                )
            return reading
        raise _refusal(role, model, reasons[0])


def _refusal(role: str, model: PreTrainedModel, why: str) -> PairError:
    return PairError(
        f"the {role} is a {type(model).__name__}, which cannot be decoded here: {why}; choose a decoder whose cache is a "
        "list of keys and values"
    )


def _short(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:160]
    return text if isinstance(error, _Differs) else f"{type(error).__name__}: {text}"


@dataclass
class _Texts:
    """Two texts and their logits in a forward pass of the library.

    Attributes:
        first: [1, n] token ids. The prompt is all but the last `_MORE`.
        second: [1, n] token ids.
        unlike: Tokens that differ from the continuation of `first` at each position.
        rows: [n, V] logits of each text.
        drift: Difference of the last logits of the prompt between the prompt alone and the whole text.
        tolerance: Largest difference that counts as rounding.
        padded: Whether masked padding on the left leaves the last logits as they are.
    """

    first: Tensor
    second: Tensor
    unlike: list[int]
    rows: tuple[Tensor, Tensor]
    drift: float
    tolerance: float
    padded: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Texts | None:
        """Return the texts for a model; None if its limits are too small or its logits are not finite."""
        config = model.config.get_text_config()
        window = getattr(config, "window_size", None)
        prefix = window + 2 if isinstance(window, int) and _PREFIX < window <= _LONGEST_WINDOW else _PREFIX
        count, rope = prefix + _MORE, length_rope(model)
        if readable(model) < count or (rope is not None and rope.original < count):
            return None
        special = _special(model.config.to_dict()) | _special(config.to_dict())
        pool = [token for token in range(min(scored_tokens(model), 512)) if token not in special]
        if len(pool) < 4:
            return None
        ids = [pool[(7 * at * at + 3 * at + at // 3) % len(pool)] for at in range(count + _OTHER + 2)]
        unlike = [pool[(pool.index(token) + 1) % len(pool)] for token in ids[prefix:count]]
        first, second = (torch.tensor([tokens], device=model.device) for tokens in (ids[:count], ids[count:]))
        rows = plain_logits(model, first), plain_logits(model, second)
        if not all(bool(logits.amax(-1).isfinite().all()) for logits in rows):
            return None  # decoding reports a broken model
        drift = _gap(plain_logits(model, first[:, :prefix])[-1:], rows[0][prefix - 1 : prefix])
        base = ROUNDING.get(model.dtype, 0.2)
        last = plain_logits(model, torch.cat([first[:, :2], second], 1), padding=2)[-1:]
        # In some dtypes the library returns NaN for padded texts, which no text can be compared with.
        padded = not bool(last.amax(-1).isfinite().all()) or _gap(last, rows[1][-1:]) <= max(base, 3 * drift)
        return cls(first, second, unlike, rows, drift, base, padded)

    def read(self, model: PreTrainedModel, reading: Reading) -> Reading:
        """Return the kinds of calls that give the expected logits.

        Errors of the model while it reads a chain are not caught.

        Raises:
            _Differs: The logits of a chain differ.
        """
        count, self._model = self.first.shape[1], model
        cache = CachedModel(model, count + 4, self.rows[0].shape[-1], streams=2, reading=reading)
        self._chain(cache, count - _MORE)
        if not reading.masked:
            return Reading(masked=False, tree=False, side_by_side=False, padded=self.padded)
        start = count - _MORE + 5
        results = []
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
        first = self.first
        self._expect("its prompt", cache.read(first[:, :start], 1)[0], start)
        if not cache.is_used:
            raise _Differs("it does not use its cache (an encoder without is_decoder=True?)")
        self._expect("one token after others", cache.read(first[:, start : start + 1])[0], start + 1)
        unlike = torch.tensor([self.unlike[2:4]], device=first.device)
        rows = cache.read(torch.cat([first[:, start + 1 : start + 2], unlike], 1))[0]
        self._expect("several tokens", rows[:1], start + 2)
        cache.roll_back(start + 2)
        self._expect("tokens after a roll-back", cache.read(first[:, start + 2 : start + 5])[0], start + 5)

    def _expect(self, what: str, rows: Tensor, end: int) -> None:
        if not self._agree(rows, self.rows[0][end - len(rows) : end]):
            raise _Differs(f"read through a cache, {what} got other logits than in the text as a whole")

    def _agree(self, rows: Tensor, expected: Tensor) -> bool:
        return _gap(rows, expected) <= max(self.tolerance, min(3 * self.drift, _CAUSAL))

    def _tree(self, cache: CachedModel, start: int) -> bool:
        """Return whether the second branch of a tree, and a token after it, have the expected logits."""
        first, at = self.first[0].tolist(), start - self.first.shape[1] + _MORE
        tree = from_widths((2, 1))  # rows: the root, its children, their children
        tokens = [first[start], self.unlike[at + 1], first[start + 1], self.unlike[at + 2], first[start + 2]]
        before = self.rows[0][start : start + 3]
        rows = cache.read_tree(tokens, TreeRows(tree, start, [], list(range(5))))[0]
        if not self._agree(rows[[0, 2, 4]], before):
            return False
        cache.keep(start, [start, start + 2, start + 4])
        return self._agree(cache.read(self.first[:, start + 3 :][:, :1])[0], self.rows[0][start + 3 : start + 4])

    def _batch(self, cache: CachedModel, start: int) -> bool:
        """Return whether both texts have the expected logits if calls read different numbers of tokens of each."""
        cache.read(self.second[:, :_OTHER], 1, stream=1)
        first, second = self.first[0].tolist(), self.second[0].tolist()
        for parts, ends in (
            ([Part(1, second[_OTHER : _OTHER + 1]), Part(0, first[start : start + 3])], (_OTHER + 1, start + 3)),
            ([Part(0, first[start + 3 : start + 4]), Part(1, second[_OTHER + 1 :])], (start + 4, _OTHER + 2)),
        ):
            logits, row = cache.read_parts(parts), 0
            for part, end in zip(parts, ends, strict=True):
                size = len(part.tokens)
                if not self._agree(logits[row : row + size], self.rows[part.stream][end - size : end]):
                    return False
                row += size
        return True


def _is_unrounded(model: PreTrainedModel) -> bool:
    """Whether a model consists of standard layers with unquantised floating-point weights."""
    weights = all(p.is_floating_point() and p.dtype.itemsize > 1 and is_plain(p) for p in model.parameters())
    return weights and all(
        type(module).__module__.startswith(_UNROUNDED) and not module._forward_pre_hooks and not module._forward_hooks
        for module in model.modules()
    )


def _special(config: dict[str, Any]) -> set[int]:
    """Return the special token ids of a configuration, such as image, padding and end-of-sequence tokens."""
    ids: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            ids |= _special(value)
        elif str(name).endswith(("token_id", "token_index", "token_ids")):
            ids.update(item for item in (value if isinstance(value, list | tuple) else [value]) if type(item) is int)
    return ids


def plain_logits(model: PreTrainedModel, ids: Tensor, padding: int = 0) -> Tensor:
    """Return the logits [n, V] of a text [1, n] with the inputs that `generate` prepares, without a cache.

    Args:
        model: The model.
        ids: The tokens.
        padding: Number of the first tokens that are masked.
    """
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
