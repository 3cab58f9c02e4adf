"""An objective that does what another one does, of which a subclass changes some."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from xscale.objective.objective import OBJECTIVES, Batch, HeadSizes, Objective


class WrappedObjective(Objective):
    """Passes everything on to `objective`."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective.config, objective.specials, objective.length, objective.seed)
        self.objective = objective

    @classmethod
    def head_sizes(cls, config: Any) -> HeadSizes | None:
        sizes: HeadSizes | None = OBJECTIVES.of(config).part.head_sizes(config)
        return sizes

    @property
    def start(self) -> int:
        return self.objective.start

    def metrics(self, predicted: Tensor, targets: Tensor) -> dict[str, float]:
        return self.objective.metrics(predicted, targets)

    def sequence_metrics(
        self, predicted: Tensor, targets: Tensor, samples: Tensor, names: Sequence[str]
    ) -> dict[str, float]:
        return self.objective.sequence_metrics(predicted, targets, samples, names)

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        return self.objective.batch(tokens, documents, index, **fields)

    def source_of(self, ids: list[int]) -> list[int]:
        return self.objective.source_of(ids)

    def prompt_of(self, ids: list[int]) -> list[int]:
        return self.objective.prompt_of(ids)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.objective.loss(model, batch)
