"""Policies on disk: the folder, safe loading, the registry of names, ONNX."""
