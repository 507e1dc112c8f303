"""The models of a pair: loading, engines, caches, masks, CUDA graphs."""
