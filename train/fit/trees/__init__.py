"""Fitting the learned policy of trees."""
