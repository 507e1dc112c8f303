"""Heads that others have released: their weights read with care, and brought into policy folders."""
