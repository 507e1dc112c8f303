"""Traces: prompts, schema, store, collectors."""
