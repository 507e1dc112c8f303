"""Fitting drafters that read the target's hidden states: its texts are recorded once, then one network on them."""
