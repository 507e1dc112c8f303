"""Fitting heads: training rows, each kind of head, calibration, scores."""
