"""Memory, work and messages of a traced step."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """Message of a rank to a process group."""

    operator: str
    group: str
    bytes: int
    phase: str


@dataclass
class PhaseCost:
    """Cost of one phase."""

    flops: float = 0.0
    moved: float = 0.0
    """Bytes read and written by the operators."""
    seconds: float = 0.0
    """Seconds by the tracer's roofline; 0 without one."""


@dataclass
class Peak:
    """Live memory at its peak."""

    total: int = 0
    phase: str = ""
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass
class TraceSegment:
    """Memory and work from one mark to the next."""

    peaks: list[Peak] = field(default_factory=list)
    """Live memory at each moment before it falls, and at the end; without any marks the largest one alone."""
    flops: float = 0.0
    moved: float = 0.0
    """Bytes read and written by the operators."""

    @property
    def peak(self) -> Peak:
        """Live memory at the peak of the segment."""
        return max(self.peaks, key=lambda peak: peak.total, default=Peak())
