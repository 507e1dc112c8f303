"""Evaluation of policies on traces."""
