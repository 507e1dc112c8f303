"""Policies that weigh the streams of a batch against each other."""
