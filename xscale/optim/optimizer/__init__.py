"""Optimizers: update the local shard of each parameter."""

from xscale.optim.optimizer import (
    adafactor,
    adamw,
    adamw_8bit,
    lion,
    muon,
    schedule_free_adamw,
)

__all__ = [
    "adafactor",
    "adamw",
    "adamw_8bit",
    "lion",
    "muon",
    "schedule_free_adamw",
]
