"""Floor 4: the training loop and the Trainer in front of it."""
