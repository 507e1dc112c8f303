"""Policies inside serving engines: drafting in vLLM, and settings for vLLM and SGLang. No engine is imported before use."""
