"""Policies by batch size: replayed under measured costs and those of a machine like a GPU, and decoded live."""
