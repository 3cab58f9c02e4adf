"""Trainer state saved in a checkpoint next to the tensors; with config and seed a run resumes from it bit-exactly."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Protocol


class Counting(Protocol):
    """An optimizer, or an engine, which has one."""

    def counters(self) -> dict[str, int]: ...

    def set_counters(self, counters: dict[str, int]) -> None: ...


@dataclass
class State:
    """Counters of the run. Dropout and data order are functions of them and the seed, so no generator is saved."""

    step: int = 0
    """Optimizer steps, including skipped ones."""
    consumed: int = 0
    """Samples read by all ranks: the full state of the data loader."""
    tokens: int = 0
    """Tokens read."""
    skipped: int = 0
    """Steps without an update, as their loss spiked or their loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Losses of the last accepted steps, oldest first, where there is a policy for loss spikes."""
    skipped_samples: list[list[int]] = field(default_factory=list)
    """[first, end) of the samples skipped by each rollback."""
    best_bits_per_byte: float | None = None
    best_step: int | None = None
    sequence_length: int | None = None
    """Tokens of a sample, the unit of `consumed` and `skipped_samples`; None: that of the checkpoint's config."""
    tokenizer_fingerprint: str | None = None
    """Fingerprint of the run's tokenizer; None: not known, in checkpoints of earlier versions."""
    unpadded_vocabulary: int | None = None
    """Rows of the vocabulary that have a probability; None: all, padding too, as in runs of earlier versions and in
    imported models, whose authors trained them so."""

    loss_scale: float | None = None
    """Scale of the loss at the next step; None: the run has not begun, or the loss is not scaled."""
    loss_scale_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    pending: list[str] = field(default_factory=list)
    """Work that is due after this step and not done, such as an evaluation that a signal cut short, by name."""

    RENAMED: ClassVar[dict[str, str]] = {"left_out": "skipped_samples"}
    """Old name of a field, which a checkpoint may have -> its name."""

    def encode(self, optimizer: Counting) -> dict[str, Any]:
        return {**asdict(self), "optimizer": optimizer.counters()}

    @staticmethod
    def check(data: dict[str, Any], counters: Collection[str]) -> None:
        """Raise ValueError, with a clause, unless `data` is what `encode` writes for an optimizer with `counters`."""
        renamed = {State.RENAMED.get(name, name): value for name, value in data.items()}
        names = {item.name for item in fields(State)} | {"optimizer"}
        twice = len(renamed) != len(data)
        values = {**OF_EARLIER_VERSIONS, **renamed}
        if values.keys() != names or twice:
            raise ValueError(
                f"the state has other fields: {', '.join(sorted(values.keys() ^ names)) or 'one twice'}"
            )
        for name in (
            "step",
            "consumed",
            "tokens",
            "skipped",
            "skipped_in_a_row",
            "loss_scale_steps",
        ):
            _require(name, values[name], _is_count(values[name]))
        for name in ("best_step", "sequence_length", "unpadded_vocabulary"):
            _require(name, values[name], values[name] is None or _is_count(values[name]))
        for name in ("sequence_length", "unpadded_vocabulary"):
            _require(name, values[name], values[name] != 0)
        fingerprint = values["tokenizer_fingerprint"]
        _require(
            "tokenizer_fingerprint",
            fingerprint,
            fingerprint is None or isinstance(fingerprint, str),
        )
        best = values["best_bits_per_byte"]
        _require(
            "best_bits_per_byte", best, best is None or (_is_number(best) and 0 <= best < 2**63)
        )
        scale = values["loss_scale"]
        _require("loss_scale", scale, scale is None or (_is_number(scale) and 0 < scale < 2**63))
        losses = values["losses"]
        optimizer = values["optimizer"]
        _require("losses", losses, isinstance(losses, list) and all(map(_is_number, losses)))
        _require(
            "skipped_samples", values["skipped_samples"], _are_spans(values["skipped_samples"])
        )
        _require("pending", values["pending"], _are_names(values["pending"]))
        _require(
            "optimizer",
            optimizer,
            isinstance(optimizer, dict) and all(map(_is_count, optimizer.values())),
        )
        # An engine that has no optimizer yet does not know its counters.
        _require("optimizer", optimizer, not counters or optimizer.keys() == set(counters))

    @staticmethod
    def decode(
        data: dict[str, Any], optimizer: Counting, length: int, before: int | None = None
    ) -> "State":
        """Restore what `encode` returned, and the optimizer's counters.

        Samples are now `length` tokens long, and were `before` where the state does not record it.
        """
        entries = {State.RENAMED.get(name, name): value for name, value in data.items()}
        optimizer.set_counters(entries.pop("optimizer"))
        state = State(**entries)
        was = state.sequence_length or before or length

        def converted(sample: int) -> int:
            """Index of the first sample of the new length that begins where `sample` begins, or after it."""
            return -(-sample * was // length)

        state.consumed, state.sequence_length = converted(state.consumed), length
        state.skipped_samples = [
            [converted(first), converted(end)] for first, end in state.skipped_samples
        ]
        return state

    def replace_with(self, other: "State") -> None:
        """Copy every field of `other`."""
        for name, value in vars(other).items():
            setattr(self, name, value)


OF_EARLIER_VERSIONS: dict[str, Any] = {
    "tokenizer_fingerprint": None,
    "unpadded_vocabulary": None,
    "loss_scale": None,
    "loss_scale_steps": 0,
    "pending": [],
}
"""Fields that earlier versions did not write, with what they stand for there."""


def _are_spans(value: Any) -> bool:
    """Whether the value is a list of [first, end] of samples."""
    return isinstance(value, list) and all(
        isinstance(span, list)
        and len(span) == 2
        and all(map(_is_count, span))
        and span[0] <= span[1]
        for span in value
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _require(name: str, value: Any, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {str(value)[:40]}")
