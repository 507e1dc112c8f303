"""Traces as arrays: read, joined, cut down to smaller trees, checked."""
