"""What the ranks' records come to."""
