"""Comparing the ranks' records, and saying in words what they come to."""
