"""Tests of what stands beside the engine: optimizers and clipping."""
