"""Off-policy estimates from live traces of a censored policy."""
