"""Families of damaged and hostile input: each module has `COUNT`, `QUICK` and `attack(count, seed, room)`."""
