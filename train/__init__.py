"""Everything offline: reading traces, replay and bounds, fitting heads, calibration, report."""
