"""The `specstop` command."""
