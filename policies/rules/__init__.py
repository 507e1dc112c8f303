"""Stop rules: of chains, and of trees."""
