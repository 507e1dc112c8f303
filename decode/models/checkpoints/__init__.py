"""What is read before a model is built: its folder, its config, its adapter, and the memory that it needs."""
