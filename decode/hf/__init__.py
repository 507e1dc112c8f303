"""Inside transformers: `generate`, stopping criteria, and folders for the Hub."""
