"""Holds the engine against torch's DDP and against one process on the joined batch."""
