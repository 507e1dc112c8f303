"""A report written down: its model, its sections, the page, the files."""
