"""What no policy can beat, and what each round lost against it."""
