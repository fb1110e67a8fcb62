"""Checkpoints: `save(obj, path)` is ``torch.save`` that never leaves a torn file."""

from paceline.checkpoint.atomic import save

__all__ = ["save"]
