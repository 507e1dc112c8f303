"""Drafters that are heads on the target's hidden states: Medusa, Hydra, CTC-drafter, one layer."""
