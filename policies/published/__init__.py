"""Published rules, registered like plugins. They import only public names of `specstop.policies`."""
