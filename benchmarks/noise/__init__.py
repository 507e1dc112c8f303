"""The parts of `noisy_profiles.py`: each checks one promise about noisy machines."""
