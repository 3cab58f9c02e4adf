"""Optimizers: update the local shard of each parameter."""

from xscale.optim.optimizer import (
    adafactor,
    adamw,
    lion,
    muon,
    schedule_free_adamw,
)

__all__ = [
    "adafactor",
    "adamw",
    "lion",
    "muon",
    "schedule_free_adamw",
]
