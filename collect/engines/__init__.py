"""Traces of serving engines."""
