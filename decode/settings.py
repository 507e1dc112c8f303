"""Settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import StoppingCriteria, StopStringCriteria

from ..policies.arguments import as_list, check_limits
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.learned import TreeGain
from .drift_monitor import MODES as DRIFT_MODES
from .models.pair import Pair
from .topology import Topology, chain, parse_tree
from .verify.modes import check_mode_name
from .verify.sampling import WARPERS, SamplingParams, model_defaults


@dataclass(frozen=True)
class Settings:
    """Options of a run besides its pair and its policy.

    Attributes:
        temperature: 0 = greedy.
        max_new_tokens: length limit of each text.
        max_depth: limit of the draft length, whatever the policy decides.
        fallback: draft length after a policy has failed.
        ignore_eos: continue after the end-of-text token.
        verification: name of a mode (`modes.MODES`), or `auto`, the fastest lossless one (`modes.resolve_mode`).
        tree: see `topology.parse_tree`; None = a chain, or the policy's tree (`for_policy`).
        sampling: other sampling parameters.
        stops: transformers' stopping criteria, called after each committed token; a text ends after the token at which the
            first one fires.
        drift: reaction when live acceptance leaves the band that a learned policy's calibration predicts: `warn`,
            `fallback` to warn and use the best fixed length, or `off`.
    """

    temperature: float = 0.0
    max_new_tokens: int = 128
    max_depth: int = 20
    fallback: int = 4
    ignore_eos: bool = False
    verification: str = "auto"
    tree: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[StoppingCriteria, ...] = ()
    drift: str = "off"

    def __post_init__(self) -> None:
        check_limits(temperature=self.temperature, max_new_tokens=self.max_new_tokens, max_depth=self.max_depth)
        check_limits(fallback=self.fallback)
        if not isinstance(self.sampling, SamplingParams):
            raise InputError(f"sampling: expected a `SamplingParams`, not {type(self.sampling).__name__}")
        processors = self.sampling.processors
        if not isinstance(processors, list | tuple) or not all(map(callable, processors)):
            raise InputError("processors: expected a tuple of logits processors")
        check_mode_name(self.verification)
        if self.drift not in DRIFT_MODES:
            raise InputError(f"--drift: expected one of {', '.join(DRIFT_MODES)}, not {self.drift!r}")
        if self.tree is not None:
            parse_tree(self.tree)
        is_sequence = isinstance(self.stops, list | tuple)
        if not is_sequence or not all(isinstance(criterion, StoppingCriteria) for criterion in self.stops):
            raise InputError(
                "stops: expected a tuple of transformers' stopping criteria; `stop_strings` returns one for strings"
            )

    @property
    def topology(self) -> Topology:
        """The tree that rounds may draft, no deeper than `max_depth`."""
        return chain(self.max_depth) if self.tree is None else parse_tree(self.tree).limited(self.max_depth)

    def for_pair(self, pair: Pair) -> Settings:
        """Return the settings with the sampling defaults of the pair's target where they are not set.

        Raises:
            InputError: a default or a processor cannot be applied.
        """
        return replace(self, sampling=resolve_sampling(pair, self.sampling, self.max_new_tokens))

    def for_policy(self, policy: StopPolicy) -> Settings:
        """Return the settings with the tree that a policy was trained for, unless they have one."""
        tree = policy_tree(policy)
        return self if tree is None or self.tree is not None else replace(self, tree=tree.name)


def resolve_sampling(pair: Pair, sampling: SamplingParams, max_new_tokens: int | None = None) -> SamplingParams:
    """Return parameters with the defaults of the target (`SamplingParams.with_defaults`) and checked processors."""
    config = getattr(pair.target, "generation_config", None)
    return sampling.with_defaults(config, max_new_tokens).checked(pair.vocabulary, pair.device)


def describe_model_defaults(pair: Pair, settings: Settings) -> str:
    """Return a sentence with the sampling defaults of the pair's target that a run has; "" if there are none."""
    applied = settings.for_pair(pair).sampling.options
    if settings.temperature == 0:
        applied = {name: value for name, value in applied.items() if name not in WARPERS}
    config = getattr(pair.target, "generation_config", None) if settings.sampling.model_defaults else None
    words = [
        f"{name}={value!s:.60}" for name, value in sorted(model_defaults(config).items()) if applied.get(name) == value
    ]
    return f"the target's generation_config sets {', '.join(words)}" if words else ""


def policy_tree(policy: StopPolicy, key: str = "tree") -> Topology | None:
    """Return the tree that a policy was trained for, or with `priced_tree` the tree of its costs; None for chains."""
    name = policy.metadata.metrics.get(key) if isinstance(policy, TreeGain) else None
    return parse_tree(name) if isinstance(name, str) else None


def stop_strings(pair: Pair, strings: str | Sequence[str]) -> tuple[StoppingCriteria, ...]:
    """Return the criterion that ends a text after any of `strings`; () without strings.

    Raises:
        InputError: the pair has no tokenizer, its tokenizer cannot be searched, or a string is empty.
    """
    strings = as_list(strings)
    if not strings:
        return ()
    if pair.tokenizer is None or not all(strings):
        raise InputError("--stop: expected strings that are not empty, and a pair with a tokenizer")
    try:
        return (StopStringCriteria(pair.tokenizer, list(strings)),)
    except (ValueError, KeyError) as error:  # a tokenizer of whole words, for example
        raise InputError(f"--stop: this pair's tokenizer cannot be searched for strings ({error})") from None
