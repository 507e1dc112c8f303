"""Learned policies: head, calibration, survival, rule."""
