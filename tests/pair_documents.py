"""Documents for pairs that are made in a test: lines of code-like words."""

from __future__ import annotations

import random

from specstop.train.demo.pair_text import Document


def documents(count: int = 10) -> list[Document]:
    chance = random.Random(5)
    words = ["alpha", "beta", "gamma", "delta", "value", "index", "return", "self", "print", "for"]
    found = []
    for number in range(count):
        lines = [
            f"doc{number}_{line} = {chance.choice(words)}({chance.choice(words)}, {chance.choice(words)})"
            for line in range(40)
        ]
        found.append(Document(f"file{number}.py", "\n".join(lines) + "\n", f"group{number % 3}"))
    return found
