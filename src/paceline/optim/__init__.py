"""Floor 3: optimizers and schedules that know about ranks, and gradient clipping."""
