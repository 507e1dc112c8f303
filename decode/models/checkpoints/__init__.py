"""Checks before a model is loaded: its folder, config and adapter, and the memory that it requires."""
