"""How the loop calls a model: supported calls, masks by layer type, and length-dependent position encodings."""
