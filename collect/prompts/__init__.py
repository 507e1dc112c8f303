"""Prompts: read from files and data sets, split, ordered, turned into tokens."""
