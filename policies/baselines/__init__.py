"""Published rules without training, one file a family."""
