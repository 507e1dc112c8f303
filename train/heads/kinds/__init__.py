"""One file for each kind of head: how it is fitted."""
