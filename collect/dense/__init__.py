"""The dense collectors: a text of the target once, drafts from every position of it."""
