"""Rounds drawn given the text beside those of the live loop."""
