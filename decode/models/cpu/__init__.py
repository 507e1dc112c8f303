"""Products of a few rows on a CPU, in the layouts of weights that measured fastest."""
