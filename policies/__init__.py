"""What a stop policy is: features, rules, heads, baselines, the folder on disk, plugins."""
