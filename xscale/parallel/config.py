"""The config of the engine: section `parallel` of a recipe."""

from typing import Literal

from xscale.core.config import Config
from xscale.mesh.axes import MeshConfig


class OffloadConfig(Config):
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer states and parameters at rest are kept instead of on the device, and stepped (deepspeed)."""
    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where each rank's part of the parameters waits until it is used (deepspeed, stage 3)."""
    folder: str | None = None
    """A folder on the disk that nvme means."""


class ZeroConfig(Config):
    engine: Literal["torch", "deepspeed"] = "torch"
    """Who shares out: torch's fully_shard, or DeepSpeed, which can offload (over data and tensor parallelism)."""
    stage: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks share out: nothing (0), optimizer states (1), gradients too (2), parameters too (3)."""
    prefetch: int = 0
    """Blocks after the one that computes whose parameters stage 3 already gathers, in forward. With 0 a block's come in
    its turn, which a GPU sees early unless something waits for it before, as the exchange of rows between experts does.
    In backward torch is one block ahead whatever is said here."""
    offload: OffloadConfig = OffloadConfig()
    """What leaves the device."""


class TensorConfig(Config):
    sequence: bool = False
    """Cut the sequence over the tp ranks between the regions that tp cuts (Korthikanti et al. 2022)."""


class PipelineConfig(Config):
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"] = "1f1b"
    """In which order the ranks of pp run the step's micro-batches through their stages."""
    chunks: int = 2
    """Stages of each rank, with schedule interleaved_1f1b."""
    stages_by_hand: tuple[int, ...] | None = None
    """Blocks of each stage, first to last (an encoder's before its decoder's); null: stages of like cost."""


class ContextConfig(Config):
    style: Literal["auto", "ulysses", "ring", "halo", "scan"] = "auto"
    """How attention sees a sequence that is spread over the ranks of cp. ulysses: it is traded for heads; ring: keys go
    round; halo: the key blocks in sight are fetched; scan: a state is passed on; auto: the first of scan, ulysses, ring
    and halo that each core can."""


class RecomputeConfig(Config):
    every: int = 0
    """Forget the activations of every k-th block and compute them again in backward; 0: keep all."""
    keep: Literal["input", "products"] = "input"
    """What such a block keeps: only what comes in (full recompute), or also what its matrix products, attention and
    experts gave, so that only the cheap rest is computed again (selective)."""
    gathered: bool = False
    """Keep of what tensor.sequence gathers into the other blocks' regions a rank's own piece, and gather it again in
    backward (Korthikanti et al. 2022): a third more traffic over tp, and 1/tp of those activations."""


class ParallelConfig(Config):
    mesh: MeshConfig = MeshConfig()
    """Degrees of the axes."""
    zero: ZeroConfig = ZeroConfig()
    """What data-parallel ranks share out."""
    tensor: TensorConfig = TensorConfig()
    """How the ranks of tp share a layer."""
    pipeline: PipelineConfig = PipelineConfig()
    """How the ranks of pp share the depth."""
    context: ContextConfig = ContextConfig()
    """How the ranks of cp share a sequence."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Which activations are computed again instead of kept."""
    compile: bool = False
    """Compile each block with torch.compile."""
    timeout_seconds: float = 600.0
    """A run that gets on no more for so long ends, and names the rank that hangs and the collective it is missed in."""


class PrecisionConfig(Config):
    compute: Literal["float64", "float32", "bfloat16"] = "float32"
    """Number format of activations and of parameters in use."""
    master: Literal["float64", "float32"] = "float32"
    """Number format of parameters at rest, gradients and optimizer states."""
    float8: Literal["tensor", "row"] | None = None
    """Multiply linear maps, but not experts and the head, in float8 with a scale for each tensor or for each row; null:
    in `compute`. Needs a GPU of compute capability 8.9 (row: 9.0). A rank of tp scales its own part of a weight."""
