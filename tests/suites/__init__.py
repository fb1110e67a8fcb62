"""Judges from outside: other projects' DDP tests, and programs from public bug reports."""
