"""Published rules, one file per rule or family, declared and built as a plugin is: they import public names only."""
