"""What `evaluate`, `compare`, `sweep` and `transfer` answer, as figures, words and pictures."""
