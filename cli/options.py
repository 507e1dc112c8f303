"""The options of the commands, each defined once; groups of options that several commands share; `--config` and run.yaml."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

from ..policies.arguments import check_limits
from ..policies.display import Progress
from ..policies.errors import InputError, close_match
from ..policies.files import RUN_FILE, write_atomic
from .output import quiet_libraries, say

if TYPE_CHECKING:
    from ..collect.prompts import Prompt
    from ..decode.models.pair import Pair
    from ..decode.settings import Settings
    from ..decode.verify.grammar import Grammar
    from ..decode.verify.sampling import SamplingParams

PROMPTS, MODELS, ROUNDS, SAMPLING, RESULT = "Prompts", "Models", "Rounds", "Sampling", "Result and run"
"""Panels of the help pages."""

SAMPLING_KEYS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "model_defaults", "json_schema",
    "grammar",
)  # fmt: skip
_GRAMMARS = ("json_schema", "grammar")
COLLECT_KEYS = (
    "batch", "completions", "draws", "explore", "hidden", "memory", "mix", "profile", "shards"
)  # fmt: skip
"""Parameters of `specstop.collect` without an option of their own."""

VERIFICATIONS = {
    **dict.fromkeys(("auto", "match", "rejection", "rejection_replace", "block", "point"), "lossless"), "typical": "LOSSY"
}  # fmt: skip
"""Verification modes, as `decode.verify.modes` has them; importing that module imports torch."""

TREES = "children by depth (4,2,2,1), fork:4x5, medusa-63, ctc-released or parents:-1,-1,0"


def option(panel: str, help: str, *names: str, **more: Any) -> Any:
    """Return a typer option in a panel of the help page."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Target = Annotated[str | None, option(MODELS, "Target model: a folder or a hub name. Default: the shipped pair.")]
Device = Annotated[str, option(MODELS, "Device of the models: cpu, cuda, cuda:1, ...")]
DeviceMap = Annotated[
    str | None,
    option(MODELS, "Placement of the target's layers by accelerate: auto, a device, or a JSON object of devices by "
           "module. The draft stays on --device."),
]  # fmt: skip
Dtype = Annotated[
    str, option(MODELS, "Number type: float32, bfloat16, float16 or float64. Quantized models keep theirs.")
]
PromptFile = Annotated[
    str | None,
    option(PROMPTS, 'A .jsonl, .csv or .parquet file with a column "prompt" (also "id", "group"), a .txt file with a '
           "prompt per line, a folder with a data set, hf:org/name[:config], or - for standard input.", "--prompts"),
]  # fmt: skip
Column = Annotated[str | None, option(PROMPTS, "Column with the prompt: text, turns, or chat messages.")]
Limit = Annotated[int | None, option(PROMPTS, "Use only the first prompts, at most this number.")]
Chat = Annotated[bool, option(PROMPTS, "Apply the tokenizer's chat template to the prompts.", "--chat")]
Traces = Annotated[Path, option(RESULT, "Trace folder of `specstop collect`.")]
ProfileFile = Annotated[Path, option(RESULT, "Latency profile of `specstop profile`.", "--profile")]
LiveProfile = Annotated[
    Path | None,
    option(ROUNDS, "Latency profile: chains are extended to a cheaper size, and policies know the costs of a round.",
           "--profile"),
]  # fmt: skip
Policy = Annotated[str, option(ROUNDS, "Stop policy: fixed:4, confidence:0.4, a policy folder, or plugin?key=value.")]
Policies = Annotated[
    list[str],
    option(
        ROUNDS, "Stop policy: fixed:4, confidence:0.4, a policy folder, or plugin?key=value; repeatable.", "--policy"
    ),
]
Depth = Annotated[
    int, option(ROUNDS, "Draft length of the recorded or timed rounds; policies trained on them stop there.")
]
Tree = Annotated[str | None, option(ROUNDS, f"Draft trees: {TREES}. Default: the policy's tree, or a chain.")]
Verification = Annotated[
    str,
    option(ROUNDS, "auto (the fastest lossless mode), match, rejection, rejection_replace, block (chains) or point: "
           "lossless. typical: LOSSY, it changes the output distribution."),
]  # fmt: skip
Batch = Annotated[int, option(ROUNDS, "Number of texts decoded side by side; when one ends, the next begins.")]
Batches = Annotated[str | None, option(ROUNDS, "Batch sizes to include, such as 1,2,4,8.", "--batch")]
Temperature = Annotated[float, option(SAMPLING, "Sampling temperature; 0 = greedy.")]
MaxNewTokens = Annotated[int, option(SAMPLING, "Maximum length of a text in new tokens.")]
Seed = Annotated[int, option(SAMPLING, "Seed of all random numbers of the command.")]
Out = Annotated[Path, option(RESULT, "Folder or file for the result.")]
Resume = Annotated[bool, option(RESULT, "Continue an interrupted run.", "--resume")]
Overwrite = Annotated[bool, option(RESULT, "Replace an existing result.", "--overwrite")]
Json = Annotated[bool, option(RESULT, "Print one line of JSON instead of tables.", "--json")]
Wide = Annotated[bool, option(RESULT, "Print all columns of the tables.", "--wide")]
Quiet = Annotated[bool, option(RESULT, "Print no progress.", "--quiet")]


# Options of one command

Library = Annotated[bool, option(ROUNDS, "Measure transformers' `generate` and its assisted settings too.")]
Collector = Annotated[
    str,
    option(ROUNDS, "dense: draft from every position of the target's text. live: record the rounds of the decoding loop, "
           "with timings. vllm: record rounds inside vLLM (docs/vllm.md)."),
]  # fmt: skip
LivePolicy = Annotated[
    str | None, option(ROUNDS, "Policy of live rounds. Default: draft to the full depth.", "--policy")
]
Extra = Annotated[
    list[str] | None,
    option(RESULT, "Another parameter of the Python function `specstop.collect` as key=value; repeatable. Keys: "
           f"{', '.join(COLLECT_KEYS)}."),
]  # fmt: skip
Drift = Annotated[
    str,
    option(ROUNDS, "If live acceptance leaves the band that a learned policy's calibration predicts: warn, fallback (use "
           "the best fixed length), or off."),
]  # fmt: skip
Stop = Annotated[list[str], option(SAMPLING, "End a text after this string; repeatable.")]
DemoFolder = Annotated[
    Path | None, option(RESULT, "Folder for the results. Default: specstop-demo, with a number if it exists.", "--out")
]
PairFolder = Annotated[
    Path | None,
    option(MODELS, "Folder of a pair with prompts (benchmarks/make_pair.py). Default: the shipped pair.", "--pair"),
]
Quick = Annotated[bool, option(RESULT, "Fewer prompts and policies: less than a minute.", "--quick")]
ProfileOut = Annotated[Path | None, option(RESULT, "JSON file for the profile. Default: replace --profile.", "--out")]
BaseProfile = Annotated[
    Path | None,
    option(ROUNDS, "Existing profile: only the decisions of --policy are timed and added to it.", "--profile"),
]
Through = Annotated[
    str | None, option(ROUNDS, "vllm: measure rounds inside vLLM, which decodes the prompts (docs/vllm.md).")
]
Budget = Annotated[float, option(RESULT, "Maximum seconds. A quiet machine needs a fraction of them.")]
Repeats = Annotated[
    int | None, option(RESULT, "Exact number of repetitions. Default: as the noise and --budget require.")
]
Check = Annotated[
    bool, option(RESULT, "Read everything: all shards of a trace must exist and match their checksums.", "--check")
]
Drafters = Annotated[bool, option(RESULT, "List drafters instead of policies.", "--drafters")]


# Groups of options


@dataclass(frozen=True)
class PromptSource:
    """The prompts of a command. The fields are options."""

    prompts: PromptFile = None
    column: Column = None
    limit: Limit = None
    chat: Chat = False

    def read(
        self, models: Models, side: str = "train", limit: int | None = None, completions: str | None = None
    ) -> list[Prompt]:
        """Read the prompts, by default those of the shipped pair. No model is loaded.

        Args:
            models: decides whether the shipped pair is used.
            side: prompts of the shipped pair, "train" or "test".
            limit: used if the option is absent.
            completions: column of texts after the prompts.

        Raises:
            InputError: there is no source, or a record is invalid.
        """
        models.check_names()
        if self.prompts is None and models.target is not None:
            raise InputError(
                "--prompts: expected a JSON Lines file or another source; only the shipped pair has prompts"
            )
        from ..collect.prompts import read_prompts
        from ..train.shipped_pair import shipped_pair

        source = self.prompts or shipped_pair() / f"prompts-{side}.jsonl"
        return read_prompts(source, self.limit or limit, column=self.column, completion=completions)

    def encode(
        self, prompts: Sequence[Prompt], pair: Pair, new_tokens: int, long: str = "skip"
    ) -> tuple[list[Prompt], list[list[int]]]:
        """Return the prompts that the pair can read with `new_tokens` more tokens, and their token ids."""
        from ..collect.prompts import fit

        return fit(self.apply_template(prompts, pair), pair.tokenizer, pair.readable - new_tokens, long)

    def apply_template(self, prompts: Sequence[Prompt], pair: Pair) -> list[Prompt]:
        """Return the prompts, with the chat template if it is requested."""
        from ..collect.prompts import apply_chat_template

        return apply_chat_template(prompts, pair.tokenizer) if self.chat else list(prompts)

    def description(self) -> str:
        """Return the source for the data card. Of a path it has only the name."""
        source = self.prompts or "the shipped pair"
        parts = [source if source.startswith("hf:") else Path(source).name]
        parts += [f"column {self.column}"] if self.column else []
        parts += [f"limit {self.limit}"] if self.limit else []
        return ", ".join([*parts, *(["chat template"] if self.chat else [])])


class ModelPaths(NamedTuple):
    """Names of target and draft (None without a draft model)."""

    target: str
    draft: str | None


@dataclass(frozen=True)
class Models:
    """The models of a command. The fields are options."""

    target: Target = None
    draft: Annotated[str | None, option(MODELS, "Draft model with the same tokenizer: a folder or a hub name.")] = None
    drafter: Annotated[
        str,
        option(MODELS, "Source of the candidates: model (the draft model), lookup, suffix, medusa:PATH, hydra:PATH, "
               "ctc:PATH, ctc-released:PATH, layer:PATH, a plugin, or two, such as suffix+model."),
    ] = "model"  # fmt: skip
    device: Device = "cpu"
    device_map: DeviceMap = None
    dtype: Dtype = "float32"

    def check_names(self) -> None:
        """Raise `InputError` if the draft model is missing, without importing torch."""
        if self.drafter == "model" and (self.target is None) != (self.draft is None):
            raise InputError(
                "expected both --target and --draft, or neither for the shipped pair; some drafters need no --draft "
                "(--drafter suffix, medusa:PATH, ...)"
            )

    def find(self, progress: Progress | None = None) -> ModelPaths:
        """Return the names of the models, by default those of the shipped pair.

        Args:
            progress: if given, all kernels are compiled now instead of on first use, when rounds may be timed.

        Raises:
            InputError: the drafter is unknown, or it requires another combination of models.
        """
        from ..decode.drafters.spec import check_drafter, needs_draft
        from ..train.shipped_pair import shipped_pair

        check_drafter(self.drafter)
        self.check_names()
        if self.target is not None and needs_draft(self.drafter) != (self.draft is not None):
            if self.draft is None:
                raise InputError(f"--draft: expected a draft model, which the drafter {self.drafter} requires")
            raise InputError(f"--draft: the drafter {self.drafter} uses no draft model; leave --draft out")
        if progress is not None:
            from ..policies import kernels

            kernels.load(progress)
        if self.target is not None:
            return ModelPaths(self.target, self.draft)
        folder = shipped_pair()
        return ModelPaths(str(folder / "target"), str(folder / "draft"))

    def open(self, paths: ModelPaths, engine: str = "auto") -> Pair:
        """Load the target and the draft model or drafter."""
        from ..decode.drafters.spec import needs_draft, with_drafter
        from ..decode.models.pair import load_pair

        quiet_libraries()
        draft = paths.draft if needs_draft(self.drafter) else None
        pair = load_pair(
            paths.target, draft, device=self.device, dtype=self.dtype, engine=engine, device_map=self.device_map
        )
        return with_drafter(pair, self.drafter)


@dataclass(frozen=True)
class Sampling:
    """Parameters of the sampled distribution besides the temperature. The field is an option."""

    sampling: Annotated[
        list[str] | None,
        option(SAMPLING, "Sampling parameter as key=value, such as top_p=0.9; repeatable. Keys: top_k, top_p, min_p, "
               "repetition_penalty, no_repeat_ngram, min_new_tokens, model_defaults (false ignores the target's "
               "generation_config), json_schema (a file), grammar (a file, EBNF of llama.cpp or Lark)."),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        self.values()

    def values(self) -> dict[str, Any]:
        """Return the parameters by name, validated without importing torch."""
        values = key_values("--sampling", self.sampling, SAMPLING_KEYS)
        if not isinstance(values.get("model_defaults", True), bool):
            raise InputError("--sampling model_defaults: expected true or false")
        if "json_schema" in values and "grammar" in values:
            raise InputError("--sampling: expected one of json_schema and grammar, not both")
        check_limits(**{name: value for name, value in values.items() if name not in _GRAMMARS})
        return values

    def params(self, grammar: Grammar | None = None) -> SamplingParams:
        """Return the parameters, with a compiled grammar if there is one."""
        from ..decode.verify.sampling import SamplingParams

        values = {name: value for name, value in self.values().items() if name not in _GRAMMARS}
        return SamplingParams(**values, processors=() if grammar is None else (grammar,))

    def grammar(self, pair: Pair) -> Grammar | None:
        """Return the grammar of the texts, compiled for the tokenizer of a pair; None if there is none.

        Raises:
            InputError: the file cannot be read or compiled, or the pair has no tokenizer.
        """
        values = self.values()
        name = next((name for name in _GRAMMARS if name in values), None)
        if name is None:
            return None
        option = f"--sampling {name}={values[name]}"
        if pair.tokenizer is None:
            raise InputError(f"{option}: expected a pair with a tokenizer; add the tokenizer's files to the target")
        from ..decode.verify.grammar import Grammar

        compile_text = Grammar.from_json_schema if name == "json_schema" else Grammar.from_text
        try:
            return compile_text(Path(values[name]).read_text(encoding="utf-8"), pair.tokenizer)
        except InputError as error:
            raise InputError(f"{option}: {error.command_line.partition(': ')[2]}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"{option}: expected a text file, which cannot be read: {reason}") from None


def key_values(name: str, items: Sequence[str] | None, keys: Collection[str] | None = None) -> dict[str, Any]:
    """Return the values of a repeatable option `name` of the form key=value. A value is read as JSON if possible.

    Raises:
        InputError: an item has another form, or an unknown or repeated key.
    """
    values: dict[str, Any] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not equals or key in values:
            raise InputError(f"{name}: expected key=value with each key once, not {item!r}")
        if keys is not None and key not in keys:
            raise InputError(f"{name}: expected one of {', '.join(keys)}, not {key!r}{close_match(key, keys)}")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def batch_sizes(text: str | None) -> tuple[int, ...]:
    """Return the batch sizes in a list such as `1,2,4,8`, in ascending order without repetitions; () for None."""
    words = [word.strip() for word in (text or "").split(",")] if text is not None else []
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise InputError(f"--batch: expected batch sizes such as 1,2,4,8, not {str(text)[:40]!r}")
    sizes = tuple(sorted({int(word) for word in words}))
    for size in sizes:
        check_limits(batch=size)
    return sizes


def print_model_defaults(pair: Pair, settings: Settings) -> None:
    """Print the sampling parameters that are taken from the target's generation_config."""
    from ..decode.settings import inherited_text

    if text := inherited_text(pair, settings):
        say(f"{text} (--sampling model_defaults=false ignores them)")


def with_groups(command: Callable[..., None], config: bool) -> Callable[..., None]:
    """Return a command for typer in which each group is replaced by its options.

    Args:
        command: a parameter with a dataclass as its type is a group.
        config: whether to add the option `--config`, which is read before the other options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            types = get_type_hints(kind, include_extras=True)
            options += [(field.name, types[field.name], field.default) for field in fields(kind)]
        else:
            options.append((parameter.name, kind, parameter.default))
    options += [("config", Config, None)] if config else []

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values.pop("config", None)
        grouped = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**grouped, **values)

    def to_parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
        default = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    # typer reads the signature and the annotations.
    setattr(run, "__signature__", inspect.Signature([to_parameter(*one) for one in options]))  # noqa: B010
    run.__annotations__ = {name: kind for name, kind, _ in options}
    return run


# Configuration files

running: ContextVar[typer.Context | None] = ContextVar("running", default=None)
"""The command that is running."""


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of options to the values in a YAML file. Options on the command line take precedence."""
    if path is None:
        return None
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """Rejects mappings with a repeated key, of which YAML would use the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if repeated := [key for number, key in enumerate(keys) if key in keys[:number]]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {repeated[0]!r} occurs twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except FileNotFoundError:
        raise InputError(f"--config: the file {path} does not exist") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config: {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict):
        raise InputError(f"--config: expected a mapping of options in {path}, not {type(raw).__name__}")
    command = raw.pop("command", context.command.name)
    if command != context.command.name:
        raise InputError(f"--config: {path} is of `specstop {command}`, not of `specstop {context.command.name}`")
    names = {parameter.name for parameter in context.command.params if parameter.name} - {"config", "help"}
    values = {str(key).replace("-", "_"): value for key, value in raw.items()}
    if len(values) < len(raw):
        raise InputError(f"--config: {path} has an option twice, with - and with _; keep one of them")
    for key in values.keys() - names:
        raise InputError(
            f"--config: {path} has the unknown option {key!r}{close_match(key, names)}; known: {', '.join(sorted(names))}"
        )
    context.default_map = {**values, **(context.default_map or {})}
    return path


Config = Annotated[
    Path | None,
    option(RESULT, "Read options from a YAML file, such as the run.yaml of a result.", "--config", callback=_load_config,
           is_eager=True),
]  # fmt: skip


@contextlib.contextmanager
def config_saved(out: Path) -> Iterator[None]:
    """Write the options of the running command to run.yaml in the result `out` of the block, unless it exists."""
    yield
    if out.is_dir() and not (out / RUN_FILE).exists():
        save_config(out / RUN_FILE)


def save_config(path: Path) -> None:
    """Write the options of the running command to a YAML file."""
    import yaml

    context = running.get()
    if context is None:
        return
    values = {name: value for name, value in context.params.items() if name != "config" and value is not None}
    plain = json.loads(json.dumps({"command": context.command.name, **values}, default=str))
    write_atomic(path, yaml.safe_dump(plain, sort_keys=False))
