"""The trace folder: shards that are there whole or not at all, checksums, its card."""
