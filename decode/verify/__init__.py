"""Verification: modes by name, sampling, noise."""
