"""Settings chosen by replayed throughput: rates, rules, heads."""
