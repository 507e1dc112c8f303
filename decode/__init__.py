"""The speculative decoder: caches, drafting, verification, the round loop, latency profile."""
