"""The loop beside others: policies in alternation, and transformers' own assisted generation."""
