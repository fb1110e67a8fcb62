"""Floor 1: how ranks talk."""
