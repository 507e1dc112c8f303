"""Exports to serving engines: what of a policy they can take, and what it is worth there."""
