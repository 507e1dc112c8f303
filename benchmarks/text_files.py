"""Text of one's own to make a pair from: JSON Lines, or a folder of files."""

from __future__ import annotations

import json
from pathlib import Path

from specstop.policies.errors import InputError
from specstop.train.demo.pair_text import Document, folder_documents


def read_documents(path: Path) -> list[Document]:
    """Read documents from JSON Lines (fields prompt, completion, group) or a folder of .py and .txt files.

    A record's text is its prompt, a newline and its completion; its prompt is used whole when it is held out.

    Raises:
        InputError: The path does not exist, holds no text, or a line is no record with a prompt.
    """
    if path.is_dir():
        documents = folder_documents(path)
        if not documents:
            raise InputError(f"expected .py or .txt files below {path}, found none")
        return documents
    if not path.is_file():
        raise InputError(f"expected a JSON Lines file or a folder of text at {path}, which does not exist")
    documents = []
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    documents.append(_record(line, f"{path}:{number}", number))
        except UnicodeDecodeError as error:
            raise InputError(f"expected UTF-8 text in {path}: {error}") from None
    return documents


def _record(line: str, where: str, number: int) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: expected a JSON object, which cannot be read: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise InputError(f"{where}: expected an object with a non-empty text field 'prompt'")
    completion = record.get("completion", "")
    if not isinstance(completion, str):
        raise InputError(f"{where}: expected text in the field 'completion', got {type(completion).__name__}")
    text = f"{record['prompt']}\n{completion}" if completion else record["prompt"]
    return Document(str(record.get("id", number)), text, str(record.get("group", "all")), record["prompt"])
