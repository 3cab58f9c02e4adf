"""A case of a job, and the reporter that its figures go to, one row each, at once."""

import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")
MEASURED, FAILED, REFUSED, OUT_OF_MEMORY = "measured", "failed", "refused", "out of memory"
REASON_CHARACTERS = 400


@dataclass(frozen=True)
class GpuContext:
    """Where and how the cases run."""

    device: str
    """cuda or cpu."""
    toy: bool
    """Sizes that a CPU computes in a second: the figures mean nothing."""
    tests: bool
    """Whether the tests run too."""
    work: Path
    """Folder of everything that does not stay: data, runs, checkpoints."""
    out: Path
    """Folder of the results, for a profile."""

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of training on the device."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def size(self, full: Value, toy: Value) -> Value:
        """Return `full`, or `toy` in a toy run."""
        return toy if self.toy else full


class CaseReporter:
    """The receiver of a case's figures."""

    def __init__(self, send: Callable[[dict[str, Any]], None], skip: Collection[str] = ()) -> None:
        self._send, self._skip = send, frozenset(skip)

    def begin(self, side: str) -> bool:
        """Announce that a side is measured from now on; False if it is not to be measured."""
        if side in self._skip:
            return False
        self._send({"begin": side})
        return True

    def figure(self, side: str, **values: Any) -> None:
        """Report one row; fields without a value are left out."""
        self._send(
            {
                "row": {
                    "side": side,
                    "status": MEASURED,
                    **{k: v for k, v in values.items() if v is not None},
                }
            }
        )

    def failure(self, side: str, error: BaseException) -> None:
        """Report that a side has no figure, and free what the exception holds."""
        status, reason = failure_of(error)
        self._send({"row": {"side": side, "status": status, "reason": reason}})
        # Frames of the traceback hold the tensors of the call that failed.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        free_memory()

    def attempt(self, side: str, function: Callable[[], Value]) -> Value | None:
        """Return what `function` returns; None, and a row with the reason, if it fails or is to be skipped."""
        if not self.begin(side):
            return None
        free_memory()
        try:
            return function()
        except Exception as error:
            self.failure(side, error)
            return None

    def measure(
        self, side: str, function: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Report the figures that `function` returns as one row, or why there are none."""
        values = self.attempt(side, function)
        if values is not None:
            self.figure(side, **values)
        return values


@dataclass(frozen=True)
class GpuCase:
    """A part of a job, measured in one call."""

    name: str
    run: Callable[[CaseReporter], None]
    seconds: float = 90.0
    """Longest time between two reports; a case that takes longer is ended."""
    headline: str = ""
    """The goal of its figure, for the table of evidence; empty: none."""
    shares_process: bool = field(default=True)
    """Whether the next case may run in the same process."""


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return the status of a row without figures, and the reason in one line."""
    from xscale.core.errors import ConfigError
    from xscale_kernels.select import UnusableError

    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    reason = " ".join(text.split())[:REASON_CHARACTERS]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error):
        return OUT_OF_MEMORY, reason
    return (REFUSED if isinstance(error, UnusableError | ConfigError) else FAILED), reason


def free_memory() -> None:
    """Free the memory of objects that nothing refers to, also on the GPU."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
