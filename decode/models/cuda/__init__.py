"""Calls recorded as CUDA graphs, and numbers moved between host and device."""
