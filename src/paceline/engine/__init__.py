"""Floor 2: how gradients are averaged."""
