"""Reading traces and replaying policies on them, exactly; and what no policy can beat."""
