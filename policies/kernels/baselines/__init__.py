"""What online baselines compute and remember."""
