"""Facts, written and read."""
