"""What `evaluate` answers, as figures, words and pictures."""
