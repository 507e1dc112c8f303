"""Evaluation of policies on traces: replay, intervals, verdicts and reports."""
