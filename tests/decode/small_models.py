"""The small models of `benchmarks/architectures.py`, which the suite samples from."""

from __future__ import annotations

from benchmark_scripts import script

table = script("architectures")
