"""Standard streams, signals, progress."""
