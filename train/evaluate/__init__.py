"""Evaluation of stop policies on held-out traces: replay, statistics, verdict and report."""
