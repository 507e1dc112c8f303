"""Replay held-out traces, compare policies, and report which one to deploy."""
