"""Families of attacks for `fuzz.py`: each module has `COUNT`, `QUICK` and `attack(count, seed, room)`."""
