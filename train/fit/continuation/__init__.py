"""Fitting the value of drafting on."""
