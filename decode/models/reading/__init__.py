"""How a model is read: what it reads right, what its layers see, and position encodings that depend on the length."""
