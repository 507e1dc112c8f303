"""From traces to a policy: heads, rules, tuning, trees, continuation values."""
