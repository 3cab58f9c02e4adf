"""What a run is at a step, beside its tensors: enough to go on as if nothing had happened."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from xscale.optim.optimizer import Optimizer
from xscale.parallel.rest import Rest


@dataclass
class State:
    """Counters of the run; noise and data order are functions of these and the seed, so no generator is saved."""

    step: int = 0
    """Optimizer steps taken, skipped ones included."""
    consumed: int = 0
    """Samples read, over all ranks: the loader's whole state."""
    tokens: int = 0
    """Tokens read."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_bits_per_byte: float | None = None
    best_step: int | None = None

    def encode(self, optimizer: Optimizer) -> dict[str, Any]:
        return {**asdict(self), "optimizer": optimizer.counters()}

    @staticmethod
    def decode(data: dict[str, Any], optimizer: Optimizer) -> "State":
        """Take back what `encode` gave; the optimizer's counters go to it."""
        rest = dict(data)
        optimizer.set_counters(rest.pop("optimizer"))
        return State(**rest)


def tensors(rests: list[Rest], optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of the run by its name on one device, with its global shape: what a checkpoint holds."""
    held = {f"model.{rest.name}": rest.parameter.detach() for rest in rests}
    trained = [rest for rest in rests if rest.parameter.requires_grad]
    for kind, states in optimizer.states().items():
        pairs = zip(trained, states, strict=True)
        held |= {f"optimizer.{kind}.{rest.name}": rest.like(state) for rest, state in pairs}
    return held
