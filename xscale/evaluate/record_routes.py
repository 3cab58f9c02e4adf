"""Records the routes of an evaluation's tokens through the mixtures of experts to a file, for router replay."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import remove_file
from xscale.data.routes.header import RouteLayout
from xscale.data.routes.read import RouteFile
from xscale.data.routes.write import RoutedSequence, RouteWriter
from xscale.mesh.consensus import Consensus
from xscale.nn.ffn.moe.replay import RECORDER
from xscale.objective.objective import Batch
from xscale.run.route_replay import text_pieces
from xscale.step.batches import MicroBatches

KEY = "--record-routes"


class BatchRoutes:
    """The routes of a micro-batch, as its forward makes them."""

    def __init__(self, layout: RouteLayout) -> None:
        self.layout = layout
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, experts: Tensor, weights: Tensor) -> None:
        """Keep the experts [N, k] and weights of mixture number `layer`; ConfigError where it is called twice."""
        if layer in self.layers:
            what = f"{self.layout.layers[layer]} is called several times in a forward"
            raise ConfigError(KEY, f"{what}, and a file has one route for a token")
        self.layers[layer] = (experts.cpu(), weights.cpu())

    def arrays(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return routes (expert plus 1) and weights [N, L, K] of all layers, for so many tokens."""
        layout = self.layout
        shape = (tokens, len(layout.layers), layout.width)
        routes, weights = np.zeros(shape, np.int64), np.zeros(shape)
        for layer, path in enumerate(layout.layers):
            if layer not in self.layers or len(self.layers[layer][0]) != tokens:
                count = len(self.layers[layer][0]) if layer in self.layers else 0
                what = f"{path} routes {count} hidden states for {tokens} tokens of text"
                raise ConfigError(KEY, f"{what}, so its tokens have no routes")
            experts, factors = self.layers[layer]
            routes[:, layer, : experts.shape[1]] = experts.numpy() + 1
            weights[:, layer, : factors.shape[1]] = factors.double().numpy()
        return routes, weights

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        _, weights = next(iter(self.layers.values()))
        return "float64" if str(weights.dtype) == "torch.float64" else "float32"


class RouteRecording:
    """Writes routes to a file. A disk that fails ends the recording, and not what is recorded."""

    def __init__(self, path: Path, layout: RouteLayout, vocabulary: int) -> None:
        self.path, self.layout, self.vocabulary = path, layout, vocabulary
        self.ranks = Consensus(doing="written")
        alone = self.ranks.world == 1
        self.part = path if alone else path.with_name(f"{path.name}.rank{self.ranks.rank}")
        self.failure: str | None = None
        self._writer: RouteWriter | None = None

    def record(
        self, batches: Iterable[tuple[Batch, bool]], source: MicroBatches
    ) -> Iterator[tuple[Batch, bool]]:
        """Yield the batches of an evaluation by `source`; the routes of each are written once it has been read."""
        for number, (batch, counts) in enumerate(batches):
            if not counts or self.failure is not None:
                yield batch, counts
                continue
            routes = BatchRoutes(self.layout)
            yield replace(batch, tokens=batch.tokens.with_signals({RECORDER: routes})), counts
            first = (number * source.ranks + source.rank) * source.micro_batch
            self._write(batch, routes, first)

    def _write(self, batch: Batch, recorded: BatchRoutes, first: int) -> None:
        pieces = list(text_pieces(batch))
        routes, weights = recorded.arrays(sum(end - start for _, start, end, _ in pieces))
        try:
            if self._writer is None:
                self._writer = RouteWriter(self.part, self.layout, self.vocabulary, recorded.dtype)
            done = 0
            for row, start, end, ids in pieces:
                rows = slice(done, done + end - start)
                done = rows.stop
                self._writer.add(
                    RoutedSequence(ids, routes[rows], weights[rows], first + row, start)
                )
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = f"{self.path}: {error.strerror or error}"
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def finish(self) -> str | None:
        """Put the file in its place; return the line that says what was recorded, or why nothing was; None on other
        ranks than the first. Collective."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._fail(error)
        states = self.ranks.on_all(self.path, lambda: (self.failure, self._writer is not None))
        failure = next((reason for reason, _ in states if reason is not None), None)
        written = [rank for rank, (_, has_part) in enumerate(states) if has_part]
        if self.ranks.world > 1:
            if failure is None and self.ranks.is_rank0:
                failure = self._merge(written)
            (failure, *_) = self.ranks.on_all(self.path, lambda: failure)
            with suppress(OSError):
                remove_file(self.part.parent, self.part.name)
        if not self.ranks.is_rank0:
            return None
        if failure is not None:
            return f"no routes are recorded: {failure}"
        header = RouteFile(self.path, KEY).header
        return f"{header.tokens:,} tokens in {header.sequences:,} texts have their routes in {self.path}"

    def _merge(self, ranks: list[int]) -> str | None:
        """Write the parts of some ranks to one file; return why that failed."""
        parts = [
            RouteFile(self.path.with_name(f"{self.path.name}.rank{rank}"), KEY) for rank in ranks
        ]
        weights = parts[0].header.weights
        try:
            writer = RouteWriter(self.path, self.layout, self.vocabulary, weights)
            try:
                for part in parts:
                    writer.copy_chunks(part.header, part.content)
                writer.close()
            except OSError:
                writer.abandon()
                raise
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        return None
