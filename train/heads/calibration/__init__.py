"""Calibration of fitted heads, and how well it holds."""
