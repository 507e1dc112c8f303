"""Parts of `benchmarks/filters.py`."""
