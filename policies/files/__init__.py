"""Files and what is in them: written whole or not at all, entries of JSON, where results go."""
