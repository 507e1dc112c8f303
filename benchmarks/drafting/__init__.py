"""Parts of `benchmarks/drafters.py`."""
