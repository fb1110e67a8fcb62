"""Each example runs as it stands."""
