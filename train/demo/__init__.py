"""The shipped pair and the demo."""
