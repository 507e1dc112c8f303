"""Check, before a model decodes, that it reads a text through our cache as the library reads it whole.

A few tokens are read in each way that the loop reads: as a chain with a roll-back, as a tree, and beside another text. Their
logits are compared with those of the library's forward without a cache, so that no list of classes is needed.
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
from ..cache import CachedModel
from ..kv_cache import scored_tokens
from ..packed import Part, TreeRows
from ..placement import is_plain
from ..view import open_view
from .layer_masks import LayerMasks
from .modes import Reading, readable
from .ropes import length_rope

ROUNDING = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Root mean square of the differences of logits, as a share of their spread over the vocabulary, that rounding explains."""

_CAUSAL = 0.2
"""Share beyond which no rounding of activations explains that logits depend on the tokens after them."""

_UNROUNDED = ("torch.nn.", "transformers.models.", "transformers.activations", "transformers.pytorch_utils")
"""Where modules are defined that round no activations."""

_PREFIX, _OTHER, _MORE = 5, 3, 9
"""Tokens of the prompts of both texts, and those that the first is continued by."""

_LONGEST_WINDOW = 1024
"""Windows that the model applies to slots by itself are crossed by the text of the check up to this size."""

_RESULTS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Reading]] = weakref.WeakKeyDictionary()


_LOCK = threading.Lock()
"""Threads may share a model: one of them checks it."""


class _Differs(Exception):
    """Logits that are not those of the library; the message says how they were read."""


def check_model(role: str, model: PreTrainedModel) -> Reading:
    """Return how a model can be read; it is checked once, and again when its configuration or adapters have changed.

    Args:
        role: `target` or `draft`, for messages.
        model: to be checked; its mode and the random state of torch are left as they are.

    Raises:
        PairError: a chain of tokens read through the cache has other logits than the library's forward.
    """
    key = _key(model)
    with _LOCK:
        known = _RESULTS.get(model)
        if known is None or known[0] != key:
            known = _RESULTS[model] = key, _check(role, model)
        return known[1]


def _key(model: PreTrainedModel) -> object:
    adapters = getattr(model, "active_adapter", None) or getattr(model, "_hf_peft_config_loaded", None)
    return str(adapters), model.dtype, model.device, model.config._attn_implementation, repr(model.config.to_dict())


def _check(role: str, model: PreTrainedModel) -> Reading:
    # A compact forward has no other to be compared with; weights that lie on the disk would be read for every call.
    if not hasattr(model, "prepare_inputs_for_generation") or any(one.is_meta for one in model.parameters()):
        return Reading()
    view, guard = open_view(model)  # the model itself stays as it is
    with torch.no_grad(), guard, torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        try:
            texts = _Texts.of(view)
        except Exception as error:  # any class of the library may fail in a way of its own
            raise _refusal(role, model, f"its forward without a cache fails: {_short(error)}") from None
        if texts is None:
            return Reading()
        if texts.drift > (texts.tolerance if _is_unrounded(model) else _CAUSAL):
            why = "the logits of a token depend on the tokens after it (an encoder without is_decoder=True?)"
            raise _refusal(role, model, why)
        reasons = []
        # Without masks of ours the library's apply, whose windows its own cache would have cut out.
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
    """Two texts and the logits of the library's forward.

    Attributes:
        first, second: token ids; the prompt of the first is all but its last `_MORE`.
        unlike: tokens that `first` does not have where they are read.
        rows: [n, V] logits of each.
        drift: difference that reading the prompt alone makes to its last logits.
        tolerance: differences that count as rounding.
    """

    first: Tensor
    second: Tensor
    unlike: list[int]
    rows: tuple[Tensor, Tensor]
    drift: float
    tolerance: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Texts | None:
        """Return the texts for a model; None where it reads none so long, or gives logits that are not finite."""
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
        first, second = (torch.tensor([some], device=model.device) for some in (ids[:count], ids[count:]))
        rows = plain_logits(model, first), plain_logits(model, second)
        if not all(bool(some.amax(-1).isfinite().all()) for some in rows):
            return None  # a broken model is reported when it decodes
        drift = _gap(plain_logits(model, first[:, :prefix])[-1:], rows[0][prefix - 1 : prefix])
        base = ROUNDING.get(model.dtype, 0.2)
        return cls(first, second, unlike, rows, drift, base)

    def read(self, model: PreTrainedModel, reading: Reading) -> Reading:
        """Return how the model reads these texts right.

        Raises:
            _Differs: a chain has other logits; anything else that reading it raises.
        """
        count, self._model = self.first.shape[1], model
        cache = CachedModel(model, count + 4, self.rows[0].shape[-1], streams=2, reading=reading)
        self._chain(cache, count - _MORE)
        if not reading.masked:
            return Reading(masked=False, tree=False, side_by_side=False)
        start = count - _MORE + 5
        results = []
        for method in (self._tree, self._beside):
            try:
                results.append(method(cache, start))
            except Exception:  # what a class does not know of ends in any error
                results.append(False)
            cache.roll_back(start)
        return Reading(tree=results[0], side_by_side=results[1])

    def _chain(self, cache: CachedModel, start: int) -> None:
        """Read the prompt, one token, three of which two are rolled back, and then several."""
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
        """Return whether the second branch of a tree, and a token after it, have the logits of the text."""
        first, at = self.first[0].tolist(), start - self.first.shape[1] + _MORE
        tree = from_widths((2, 1))  # rows: the root, its children, their children
        tokens = [first[start], self.unlike[at + 1], first[start + 1], self.unlike[at + 2], first[start + 2]]
        before = self.rows[0][start : start + 3]
        rows = cache.read_tree(tokens, TreeRows(tree, start, [], list(range(5))))[0]
        if not self._agree(rows[[0, 2, 4]], before):
            return False
        cache.keep(start, [start, start + 2, start + 4])
        return self._agree(cache.read(self.first[:, start + 3 :][:, :1])[0], self.rows[0][start + 3 : start + 4])

    def _beside(self, cache: CachedModel, start: int) -> bool:
        """Return whether both texts have the same logits read in one call, of which they have unequal shares."""
        cache.read(self.second[:, :_OTHER], 1, stream=1)
        first, second = self.first[0].tolist(), self.second[0].tolist()
        for parts, ends in (
            ([Part(1, second[_OTHER : _OTHER + 1]), Part(0, first[start : start + 3])], (_OTHER + 1, start + 3)),
            ([Part(0, first[start + 3 : start + 4]), Part(1, second[_OTHER + 1 :])], (start + 4, _OTHER + 2)),
        ):
            got, row = cache.read_parts(parts), 0
            for part, end in zip(parts, ends, strict=True):
                size = len(part.tokens)
                if not self._agree(got[row : row + size], self.rows[part.stream][end - size : end]):
                    return False
                row += size
        return True


def _is_unrounded(model: PreTrainedModel) -> bool:
    """Whether all of a model is made of ordinary layers with weights of floating point."""
    weights = all(p.is_floating_point() and p.dtype.itemsize > 1 and is_plain(p) for p in model.parameters())
    return weights and all(
        type(module).__module__.startswith(_UNROUNDED) and not module._forward_pre_hooks and not module._forward_hooks
        for module in model.modules()
    )


def _special(config: dict[str, Any]) -> set[int]:
    """Return the token ids that a configuration names: those of images, of padding, of ends."""
    ids: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            ids |= _special(value)
        elif str(name).endswith(("token_id", "token_index", "token_ids")):
            ids.update(one for one in (value if isinstance(value, list | tuple) else [value]) if type(one) is int)
    return ids


def plain_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return [n, V], the logits of a text [1, n] as `generate` has the model read it, without a cache."""
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False, "is_first_iteration": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
    library: Any = type(model)
    # That of the class: PEFT replaces a model's, to insert soft prompts, which the loop leaves to the prompt's reading.
    prepared = library.prepare_inputs_for_generation(model, ids, **inputs)
    logits: Tensor = model(**{name: value for name, value in prepared.items() if value is not None}).logits[0]
    return logits


def _gap(rows: Tensor, expected: Tensor) -> float:
    """Return the root mean square of differences [n, V] over the spread of what is expected, of the worst row."""
    width = min(rows.shape[-1], expected.shape[-1])
    a, b = rows[..., :width].double(), expected[..., :width].double()
    finite = b.isfinite()
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return torch.inf
    apart = torch.where(finite, a - b, 0.0).square().mean(-1).sqrt()
    spread = torch.where(finite, b, 0.0).std(-1, correction=0).clamp_min(1e-9 * float(b[finite].abs().max()) + 1e-30)
    return float((apart / spread).max())
