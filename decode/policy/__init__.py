"""A policy in the loop: what it is shown, who asks it, and whether its calibration still holds."""
