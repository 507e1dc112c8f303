"""The families of attacks of `benchmarks/fuzz.py`, for tests that run a seeded sample of them."""

from __future__ import annotations

from benchmark_scripts import family

__all__ = ["family"]
