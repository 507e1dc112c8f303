"""Compiled scalar code: what a decision computes, once, for one stream as for thousands. Imported on first use only."""
