"""Timings and what is made of them: kept measurements, robust fits, the costs of a profile, and how noisy it was."""
