"""The commands that answer by a report."""
