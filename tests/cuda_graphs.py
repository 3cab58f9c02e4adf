"""CUDA graphs on a CPU: the operators of a captured call are recorded with their tensors, and replayed in place.

As on a GPU nothing of Python runs in a replay, results are written where those of the capture are, and what the host
knew at the capture stays as it was. Reading a number on the host while capturing is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::item"}


class Recorder(TorchDispatchMode):
    """Records the operators of a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]))
        return out


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, kept in self.recorder.calls:
                out = func(*args, **kwargs)
                results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                for old, new in zip(kept, results, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


class Captures:
    """Graphs that were captured, and how often each was replayed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[FakeGraph] = []
        self.events: list[str] = []

        class Stream:
            def wait_stream(self, _: object) -> None:
                captures.events.append("wait")

        captures = self
        stream = Stream()
        patch.setattr(torch.cuda, "Stream", lambda: stream)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", lambda _: self._section("side stream"))
        patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        patch.setattr(torch.cuda, "graph", self._capture)

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        self.events.append(f"begin {name}")
        yield
        self.events.append(f"end {name}")

    @contextmanager
    def _capture(self, graph: FakeGraph) -> Iterator[None]:
        self.graphs.append(graph)
        with self._section("capture"), graph.recorder:
            yield
