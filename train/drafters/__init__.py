"""Fitting drafters that read the target's hidden states: its own texts recorded once, then one network on them."""
