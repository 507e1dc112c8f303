"""The options of the commands: one table of their texts, the groups that several commands share, `--config` and run.yaml.

A command is a function. Its signature has the types and defaults of its options, and `OPTIONS` has their texts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..policies.arguments import check_limits
from ..policies.display import Progress
from ..policies.errors import InputError, close_match
from ..policies.files import RUN_FILE, write_atomic
from .output import print_stderr, quiet_libraries

if TYPE_CHECKING:
    from ..collect.prompts import Prompt
    from ..decode.models.pair import Pair
    from ..decode.settings import Settings
    from ..decode.verify.sampling import SamplingParams

SAMPLING_KEYS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "model_defaults", "json_schema",
    "grammar",
)  # fmt: skip
_GRAMMARS = ("json_schema", "grammar")  # the values are paths
COLLECT_KEYS = (
    "batch", "completions", "draws", "explore", "hidden", "memory", "mix", "profile", "shards"
)  # fmt: skip
"""Parameters of `specstop.collect` without an option."""

VERIFICATIONS = ("auto", "match", "rejection", "rejection_replace", "block", "point", "typical")
"""Verification modes, as `decode.verify.modes` has them; importing that module imports torch."""

ONE_THREAD_BYTES = 80_000_000
"""Size of a target on a CPU below which one thread is used: two that wait for each other beside a busy process took 90 s for
6 prompts, one took 8 s."""

_POLICY = "Stop policy: fixed:4, confidence:0.4, a policy folder, or plugin?key=value"
_PROFILE = "Latency profile of `specstop profile`"
_TRACE = "Trace folder of `specstop collect`"

_TEXTS: dict[str, dict[str, str]] = {
    "Arguments": {
        "decode text": "Prompts. Default: standard input, or --prompts.",
        "import source": "Weights: a .pt, .bin or .safetensors file, or a folder with one. Or records of an engine: a "
        ".jsonl file of responses (vLLM, SGLang, llama.cpp), a log of llama.cpp's server, or a run of inference-lab. Or with "
        "--lengths a table: a .parquet, .csv or .jsonl file with a row for each text.",
        "info path": "Folder of a trace, a policy, a drafter or a model, or a profile.",
    },
    "Prompts": {
        "prompts": 'A .jsonl, .csv or .parquet file with a column "prompt" (also "id", "group"), a .txt file with a '
        "prompt per line, a folder with a data set, hf:org/name[:config], or - for standard input.",
        "column": "Column with the prompt: text, turns, or chat messages.",
        "import column": "Column of the table as key=NAME; repeatable. Keys: id, prompt_tokens, tokens (ids of the text), "
        "group, sample. Default: the name of the key.",
        "lengths": "Drafter and column as NAME=COLUMN; repeatable. The column has a list for each text: how many tokens of "
        "the drafter the target accepts at each position.",
        "bonus": "Lengths include the token that the target adds in each round.",
        "limit": "Use only the first prompts, at most this number.",
        "chat": "Apply the tokenizer's chat template to the prompts.",
        "traces": f"{_TRACE}; repeatable, such as for several temperatures.",
        "deploy traces": f"{_TRACE} with training prompts: dense chains.",
        "evaluate traces": "Trace folder of held-out prompts; repeatable for several places.",
        "train_traces": "Training traces to tune thresholds and rates on for this profile.",
        "held_out": "Traces of other prompts to report on. Default: a quarter of the prompts of --traces.",
        "mixed": "Trace of `collect --extra mix=...` that the head is fitted on instead.",
        "allow_overlap": "Warn about training prompts instead of refusing them.",
        "report_prompts": "Evaluate only the prompts that `train --report-share` kept back.",
        "report_share": "Share of the prompts that is kept out of fitting and selection, for the held-out figures.",
    },
    "Models": {
        "target": "Target model: a folder or a hub name. Default: the shipped pair.",
        "import target": "Target of Medusa's heads, which become a drafter, or of records. Default: import a policy.",
        "draft": "Draft model with the same tokenizer: a folder or a hub name.",
        "drafter": "Source of the candidates: model (the draft model), lookup, suffix, medusa:PATH, hydra:PATH, ctc:PATH, "
        "ctc-released:PATH, layer:PATH, or a plugin; repeatable: a policy that routes chooses among them in each round, "
        "others use the first. `suffix+model` names two. Default: model.",
        "free": "Drafter of --lengths that reads nothing before a round, such as lookup; repeatable.",
        "deploy drafter": "hf: the drafter, as in `specstop decode`; repeatable. Default: that of --traces or the training.",
        "device": "Device of the models: cpu, cuda, cuda:1, ...",
        "device_map": "Placement of the target's layers by accelerate: auto, a device, or a JSON object of devices by "
        "module. The draft stays on --device.",
        "dtype": "Number type: float32, bfloat16, float16 or float64. Quantized models keep theirs.",
        "pair": "Folder of a pair with prompts (docs/benchmarks.md). Default: the shipped pair.",
    },
    "Rounds": {
        "policy": f"{_POLICY}; repeatable.",
        "collect policy": "Policy of live rounds. Default: draft to the full depth.",
        "decode policy": f"{_POLICY}.",
        "deploy policy": "Policy folder, or hub:owner/name. Of an engine's table: reports its loss.",
        "profile": "Latency profile: chains are extended to a cheaper size, and policies know the costs of a round.",
        "deploy profile": f"{_PROFILE}. Tables have the batch sizes that it measured.",
        "evaluate profile": f"{_PROFILE}; repeatable for several places.",
        "train profile": f"{_PROFILE}.",
        "profile profile": "Existing profile: only the decisions of --policy are timed and added to it.",
        "table": "CSV table of measured calls (docs/engines.md), from which the profile is built: nothing is measured.",
        "depth": "Draft length of the recorded or timed rounds; policies trained on them stop there.",
        "import depth": "Deepest draft. Default: 5 (DynaSD), 20 (SpecDec++), the largest length of a table.",
        "train-drafter depth": "Number of tokens that it learns to propose.",
        "tree": "Draft trees: children by depth (4,2,2,1), fork:4x5, medusa-63, ctc-released or parents:-1,-1,0. Default: "
        "the policy's tree, or a chain.",
        "verification": "auto (the fastest lossless mode), match, rejection, rejection_replace, block (chains) or point: "
        "lossless. typical: LOSSY, it changes the output distribution.",
        "batch": "Number of texts decoded side by side; when one ends, the next begins.",
        "evaluate batch": "Batch sizes to include, such as 1,2,4,8.",
        "profile batch": "Batch sizes to include, such as 1,2,4,8.",
        "library": "Measure transformers' `generate` and its assisted settings too.",
        "collector": "dense: draft from every position of the target's text. live: record the rounds of the decoding "
        "loop, with timings. vllm: record rounds inside vLLM (docs/engines.md).",
        "through": "vllm: measure rounds inside vLLM, which decodes the prompts (docs/engines.md).",
        "drift": "If live acceptance leaves the band that a learned policy's calibration predicts: warn, fallback (use "
        "the best fixed length), or off.",
        "achievable": "Add what a policy with all features reaches (minutes).",
        "arrivals": "With --batch: requests per second at random times, or a JSON file of times. Default: all at once.",
    },
    "Policy": {
        "head": "Head to fit: logistic, tokens, mlp, xgboost, ...; with --tune several, separated by commas. Default: "
        "logistic, or with --tune these four.",
        "decide": "What to learn: stop (when to stop drafting; of several drafters the first, or stop@NAME), route (which of "
        "them drafts) or both.",
        "rule": "derived (from costs), survival, step, any, batch, or gain for trees; with --tune several, separated by "
        "commas. Default: the head's.",
        "threshold": "Threshold of the rules survival, step and any. Default: the one that replays fastest.",
        "import threshold": "Threshold of the published rule. Default: 0.4 (DynaSD), 0.3 (SpecDec++, h = 0.7).",
        "feature": "Feature that the head reads; repeatable. Default: a few.",
        "hidden": "Hidden state that the head reads; repeatable.",
        "host": "vllm: a policy that reads only what that engine has.",
        "param": "Hyper-parameter of the head as key=value, such as epochs=20; repeatable.",
        "trainer": "Argument of lightning's Trainer as key=value, such as accelerator=gpu; repeatable.",
        "nodes": "With --rule gain: sizes of smaller trees to try, such as 63,24,8; the fastest one is kept.",
        "tune": "Try that many heads, hyper-parameters and rules by replay, and train the best.",
        "storage": "With --tune: journal file of optuna; a search continues from its trials.",
        "kind": "medusa, hydra (heads), ctc, or layer (one autoregressive transformer layer).",
        "outputs": "Number of tokens that a layer can propose, the most frequent ones; 0 = all.",
        "epochs": "Maximum epochs; training stops early.",
        "batch_size": "Texts in a training step.",
        "learning_rate": "Learning rate at its peak.",
        "rejection_weight": "Weight of rejections in SpecDec++'s training. Its bias is removed: 6 for the released "
        "head, 1 for none.",
        "to": "onnx: a file with the calibrated probabilities. hf: a folder for generate(custom_generate=...) that runs "
        "the exact policy. vllm: the policy as a class that drafts there. vllm, sglang, trtllm: draft lengths by batch "
        "size. llama.cpp: draft length and p_min. These four need --traces and --profile.",
    },
    "Sampling": {
        "temperature": "Sampling temperature; 0 = greedy.",
        "train-drafter temperature": "Sampling temperature of half of the target's texts; the other half is greedy.",
        "sampling": "Sampling parameter as key=value, such as top_p=0.9; repeatable. Keys: top_k, top_p, min_p, "
        "repetition_penalty, no_repeat_ngram, min_new_tokens, model_defaults (false ignores the target's "
        "generation_config), json_schema (a file), grammar (a file, EBNF of llama.cpp or Lark).",
        "stop": "End a text after this string; repeatable.",
        "max_new_tokens": "Maximum length of a text in new tokens.",
        "seed": "Seed of all random numbers of the command.",
    },
    "Result and run": {
        "out": "Folder or file for the result.",
        "demo out": "Folder for the results. Default: specstop-demo, with a number if it exists.",
        "evaluate out": "Folder for the report. Default: it is only printed.",
        "profile out": "JSON file for the profile. Default: replace --profile.",
        "extra": "Another parameter of the Python function `specstop.collect` as key=value; repeatable. Keys: "
        f"{', '.join(COLLECT_KEYS)}.",
        "quick": "Fewer prompts and policies: less than a minute.",
        "budget": "Maximum seconds. A quiet machine needs a fraction of them.",
        "repeats": "Exact number of repetitions. Default: as the noise and --budget require.",
        "checkpoints": "Folder that keeps the recorded texts and the checkpoints; an interrupted run continues from it.",
        "compare": "Earlier report to compare with. Without --traces: two reports.",
        "cluster": "Unit of the intervals: prompt, or group if its prompts are similar.",
        "primary": "Policy chosen before this evaluation: its interval is not widened for the other policies.",
        "check": "Read everything: all shards of a trace must exist and match their checksums.",
        "drafters": "List drafters instead of policies.",
        "resume": "Continue an interrupted run.",
        "overwrite": "Replace an existing result.",
        "wide": "Print all columns of the tables.",
        "json": "Print one line of JSON instead of tables.",
        "quiet": "Print no progress.",
        "config": "Read options from a YAML file, such as the run.yaml of a result.",
    },
}
"""Help texts by panel and parameter; `command parameter` if a command has another text than the others."""

OPTIONS = {name: (panel, text) for panel, texts in _TEXTS.items() for name, text in texts.items()}
_FLAGS = {"host": "--for", "library": "--library/--no-library", "table": "--from"}
"""Flags that are not the names of their parameters."""

running: ContextVar[typer.Context | None] = ContextVar("running", default=None)
"""The command that is running."""


@dataclass(frozen=True)
class PromptSource:
    """The prompts of a command. The fields are options."""

    prompts: str | None = None
    column: str | None = None
    limit: int | None = None
    chat: bool = False

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

        source = self.prompts or Path(models.names[0]).parent / f"prompts-{side}.jsonl"
        return read_prompts(source, self.limit or limit, column=self.column, completion=completions)

    def encode(
        self, prompts: Sequence[Prompt], pair: Pair, new_tokens: int, skip_long: bool = True
    ) -> tuple[list[Prompt], list[list[int]]]:
        """Return the prompts that the pair can read with `new_tokens` more tokens, and their token ids."""
        from ..collect.prompts import tokenize_prompts

        prompts = self.apply_template(prompts, pair)
        return tokenize_prompts(prompts, pair.tokenizer, pair.readable - new_tokens, skip_long)

    def apply_template(self, prompts: Sequence[Prompt], pair: Pair) -> list[Prompt]:
        """Return the prompts, with the chat template if it is requested."""
        from ..collect.prompts import apply_chat_template

        return apply_chat_template(prompts, pair.tokenizer) if self.chat else list(prompts)

    def description(self) -> str:
        """Return the source for the data card. Of a path it has only the name."""
        source = self.prompts or "the shipped pair"
        parts = [source if source.startswith("hf:") else Path(source).name]
        parts += [f"{name} {value}" for name, value in (("column", self.column), ("limit", self.limit)) if value]
        return ", ".join([*parts, *(["chat template"] if self.chat else [])])


@dataclass(frozen=True)
class Models:
    """The models of a command. The fields are options."""

    target: str | None = None
    draft: str | None = None
    drafter: list[str] | None = None
    device: str = "cpu"
    device_map: str | None = None
    dtype: str = "float32"

    @property
    def drafters(self) -> str:
        """The spec of the drafters, such as `suffix+model`."""
        return "+".join(self.drafter or ["model"])

    def check_names(self) -> None:
        """Raise `InputError` if the draft model is missing, without importing torch."""
        if self.drafters == "model" and (self.target is None) != (self.draft is None):
            raise InputError(
                "expected both --target and --draft, or neither for the shipped pair; some drafters need no --draft "
                "(--drafter suffix, medusa:PATH, ...)"
            )

    @functools.cached_property
    def names(self) -> tuple[str, str | None]:
        """Names of target and draft (None without a draft model), by default those of the shipped pair."""
        if self.target is not None:
            return self.target, self.draft
        from ..train.shipped_pair import shipped_pair

        folder = shipped_pair()
        return str(folder / "target"), str(folder / "draft")

    def open(self, progress: Progress | None = None, engine: str = "auto") -> Pair:
        """Load the target and the draft model or drafter.

        Args:
            progress: if there is one, all kernels are compiled now instead of on first use, when rounds may be timed.
            engine: see `load_pair`.

        Raises:
            InputError: the drafter is unknown, or it requires another combination of models.
        """
        import torch

        from ..decode.drafters.spec import check_drafter, needs_draft, with_drafter
        from ..decode.models.pair import load_pair
        from ..policies import kernels

        check_drafter(self.drafters)
        self.check_names()
        needed = needs_draft(self.drafters)
        if self.target is not None and needed and self.draft is None:
            raise InputError(f"--draft: expected a draft model, which the drafter {self.drafters} requires")
        if self.target is not None and not needed and self.draft is not None:
            raise InputError(f"--draft: the drafter {self.drafters} uses no draft model; leave --draft out")
        if progress is not None:
            kernels.load(progress)
        quiet_libraries()
        target, draft = self.names
        files = Path(target).iterdir() if self.device == "cpu" and os.path.isdir(target) else ()
        if 0 < sum(file.stat().st_size for file in files) < ONE_THREAD_BYTES:
            torch.set_num_threads(1)
        pair = load_pair(
            target, draft if needed else None, device=self.device, dtype=self.dtype, engine=engine,
            device_map=self.device_map,
        )  # fmt: skip
        return with_drafter(pair, self.drafters)


@dataclass(frozen=True)
class Sampling:
    """Parameters of the sampled distribution. The fields are options."""

    temperature: float = 0.0
    sampling: list[str] | None = None

    def __post_init__(self) -> None:
        self.values()

    def values(self) -> dict[str, Any]:
        """Return the parameters besides the temperature by name, validated without importing torch."""
        values = key_values("--sampling", self.sampling, SAMPLING_KEYS, texts=_GRAMMARS)
        if not isinstance(values.get("model_defaults", True), bool):
            raise InputError("--sampling model_defaults: expected true or false")
        if "json_schema" in values and "grammar" in values:
            raise InputError("--sampling: expected one of json_schema and grammar, not both")
        check_limits(**{name: value for name, value in values.items() if name not in _GRAMMARS})
        return values

    def params(self, pair: Pair | None = None) -> SamplingParams:
        """Return the parameters; of a pair with the grammar, if there is one, compiled for its tokenizer.

        Raises:
            InputError: the file cannot be read or compiled, or the pair has no tokenizer.
        """
        from ..decode.verify.sampling import SamplingParams

        values = self.values()
        files = {name: values.pop(name) for name in _GRAMMARS if name in values}
        if pair is None or not files:
            return SamplingParams(**values)
        ((name, file),) = files.items()
        option = f"--sampling {name}={file}"
        if pair.tokenizer is None:
            raise InputError(f"{option}: expected a pair with a tokenizer; add the tokenizer's files to the target")
        from ..decode.verify.grammar import Grammar

        compile_text = Grammar.from_json_schema if name == "json_schema" else Grammar.from_text
        try:
            grammar = compile_text(Path(file).read_text(encoding="utf-8"), pair.tokenizer)
        except InputError as error:
            raise InputError(f"{option}: {error.command_line.partition(': ')[2]}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"{option}: expected a text file, which cannot be read: {reason}") from None
        return SamplingParams(**values, processors=(grammar,))


def print_model_defaults(pair: Pair, settings: Settings) -> None:
    """Print the sampling parameters that are taken from the target's generation_config."""
    from ..decode.settings import describe_model_defaults

    if text := describe_model_defaults(pair, settings):
        print_stderr(f"{text} (--sampling model_defaults=false ignores them)")


def key_texts(name: str, items: Sequence[str] | None, keys: Collection[str] | None = None) -> dict[str, str]:
    """Return the values of a repeatable option `name` of the form key=value.

    Raises:
        InputError: an item has another form, or an unknown or repeated key.
    """
    values: dict[str, str] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not equals or key in values:
            raise InputError(f"{name}: expected key=value with each key once, not {item!r}")
        if keys is not None and key not in keys:
            raise InputError(f"{name}: expected one of {', '.join(keys)}, not {key!r}{close_match(key, keys)}")
        values[key] = text
    return values


def key_values(
    name: str, items: Sequence[str] | None, keys: Collection[str] | None = None, texts: Collection[str] = ()
) -> dict[str, Any]:
    """Return the same values read as JSON if possible, except for those of the keys `texts`; see `key_texts`."""
    values: dict[str, Any] = dict(key_texts(name, items, keys))
    for key in values.keys() - set(texts):
        with contextlib.suppress(ValueError, RecursionError):
            values[key] = json.loads(values[key])
    return values


def numbers(name: str, text: str | None) -> list[int]:
    """Return the numbers in a list such as `1,2,4,8`, the value of the option `name`; [] for None."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise InputError(f"{name}: expected numbers such as 1,2,4,8, not {str(text)[:40]!r}")
    return [int(word) for word in words]


def batch_sizes(text: str | None) -> tuple[int, ...]:
    """Return the batch sizes of the option `--batch` in ascending order."""
    sizes = tuple(sorted({*numbers("--batch", text)}))
    for size in sizes:
        check_limits(batch=size)
    return sizes


def repeated(*names: str) -> list[str]:
    """Return the words that set these options of the running command again, without those at their default."""
    context, words = running.get(), []
    defaults = {option.name: option.default for option in context.command.params} if context else {}
    for name in names:
        value = context.params.get(name) if context else None
        for item in value if isinstance(value, list | tuple) else [value]:  # typer's empty list is a tuple
            if item not in (None, False, defaults.get(name)):
                words += [f"--{name.replace('_', '-')}", *([] if item is True else [str(item)])]
    return words


# Commands and configuration files


def with_options(name: str, command: Callable[..., None], config: bool) -> Callable[..., None]:
    """Return a command for typer: parameters get their texts, and groups are replaced by their fields.

    Args:
        name: of the command.
        command: its parameters are options; one with a dataclass as its type is a group of options.
        config: whether to add the option `--config`, which is read before the other options.
    """
    hints = get_type_hints(command)
    groups: dict[str, Any] = {parameter: kind for parameter, kind in hints.items() if is_dataclass(kind)}
    options: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(command).parameters.values():
        if group := groups.get(parameter.name):
            types = get_type_hints(group)
            options += [(field.name, types[field.name], field.default) for field in fields(group)]
        else:
            options.append((parameter.name, hints[parameter.name], parameter.default))
    options += [("config", Path | None, None)] if config else []

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values.pop("config", None)
        grouped = {
            group: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for group, kind in groups.items()
        }
        command(**grouped, **values)

    def to_parameter(option: str, kind: Any, default: Any) -> inspect.Parameter:
        panel, text = OPTIONS.get(f"{name} {option}") or OPTIONS[option]
        flag = _FLAGS.get(option, f"--{option.replace('_', '-')}")
        info: Any = typer.Option(flag, help=text, rich_help_panel=panel)
        if panel == "Arguments":
            info = typer.Argument(help=text)
        elif option == "config":
            info = typer.Option(flag, help=text, rich_help_panel=panel, callback=_load_config, is_eager=True)
        default = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(
            option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )

    parameters = [to_parameter(*one) for one in options]
    # typer reads the signature and the annotations.
    setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Set the defaults of options to the values in a YAML file. Options on the command line take precedence."""
    if path is None:
        return None
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        raw, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except FileNotFoundError:
        raise InputError(f"--config: the file {path} does not exist") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config: {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict) or not isinstance(node, yaml.MappingNode):
        raise InputError(f"--config: expected a mapping of options in {path}, not {type(raw).__name__}")
    command = raw.pop("command", context.command.name)
    if command != context.command.name:
        raise InputError(f"--config: {path} is of `specstop {command}`, not of `specstop {context.command.name}`")
    names = {parameter.name for parameter in context.command.params if parameter.name} - {"config", "help"}
    keys = [str(key.value).replace("-", "_") for key, _ in node.value]
    if repetition := next((key for number, key in enumerate(keys) if key in keys[:number]), None):
        raise InputError(f"--config: {path} has the option {repetition!r} twice; keep one of them")
    values = {str(key).replace("-", "_"): value for key, value in raw.items()}
    for key in values.keys() - names:
        raise InputError(
            f"--config: {path} has the unknown option {key!r}{close_match(key, names)}; known: {', '.join(sorted(names))}"
        )
    for parameter in context.command.params:
        if getattr(parameter, "multiple", False) and isinstance(value := values.get(parameter.name), str):
            values[parameter.name] = [value]  # one value of a repeatable option
    context.default_map = {**values, **(context.default_map or {})}
    return path


def save_config(context: typer.Context) -> None:
    """Write the options of a command to run.yaml in its result, or beside the file of a profile, unless it exists."""
    out, name = context.params.get("out"), context.command.name
    # An export for others: paths of this machine mean nothing there.
    if out is None or context.params.get("to") in ("hf", "onnx"):
        return
    path = out / RUN_FILE if out.is_dir() else out.with_name(f"{out.name}.{RUN_FILE}")
    if not out.exists() or (out.is_dir() and path.exists()):
        return
    import yaml

    values = {key: value for key, value in context.params.items() if key != "config" and value is not None}
    plain = json.loads(json.dumps({"command": name, **values}, default=str))
    write_atomic(path, yaml.safe_dump(plain, sort_keys=False))
