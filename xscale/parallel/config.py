"""Config of the engine: section `parallel` of a recipe."""

from typing import Any, Literal

from pydantic import field_validator

from xscale.core.config import Config, NonNegativeInt, PositiveFloat, PositiveInt
from xscale.core.paths import PathText
from xscale.mesh.axes import MeshConfig


class OffloadConfig(Config):
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer states and master parameters are stored and updated; none: on the device (deepspeed)."""
    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where each rank's parameter shards are stored between uses; none: on the device (deepspeed, stage 3)."""
    folder: PathText | None = None
    """Folder on the local disk that nvme uses."""


class ZeroConfig(Config):
    engine: Literal["torch", "deepspeed"] = "torch"
    """ZeRO implementation: torch's fully_shard (FSDP2), or DeepSpeed, which can offload (data and tensor parallel)."""
    stage: Literal[0, 1, 2, 3] = 1
    """States sharded over the data-parallel ranks: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters."""
    prefetch: NonNegativeInt | None = None
    """ZeRO-3: how many blocks ahead to all-gather in forward. 0: FSDP's implicit prefetch, which stalls when a block
    syncs with the host, as the all-to-all of experts does; null: 1 with ep > 1, else 0. Backward always prefetches one
    block."""
    offload: OffloadConfig = OffloadConfig()
    """Offload to CPU memory or NVMe."""


class TensorConfig(Config):
    sequence: bool = False
    """Sequence parallelism: shard activations over tp along the sequence, between the tensor-parallel regions
    (Korthikanti et al. 2022)."""


class PipelineConfig(Config):
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"] = (
        "1f1b"
    )
    """Pipeline schedule: the order of forwards and backwards of a step's micro-batches."""
    stages_per_rank: PositiveInt = 2
    """Stages of each rank (virtual pipeline stages), with schedule interleaved_1f1b."""
    blocks_per_stage: tuple[PositiveInt, ...] | None = None
    """Blocks of each stage, first to last (an encoder's before its decoder's); null: stages of balanced cost."""
    renamed = {
        "chunks": "stages_per_rank",
        "stages_by_hand": "blocks_per_stage",
    }


class ContextConfig(Config):
    style: Literal["auto", "ulysses", "ring", "halo", "scan"] = "auto"
    """How attention sees a sequence that is sharded over cp. ulysses: all-to-all of sequence for heads; ring: keys and
    values pass round the ring of ranks; halo: fetch the visible key blocks; scan: pass a state on; auto: the first of
    scan, ulysses, ring and halo that each core supports."""
    gather: bool = False
    """Run mixers and cores that have no style on the full sequence, gathered on each rank of cp, in place of a refusal:
    the rest of the model is sharded, but such a mixer takes the time and memory of cp=1, so that cp saves nothing
    in it. `xscale plan` lists these mixers."""


class ExpertConfig(Config):
    dispatch: Literal["all_to_all", "deepep"] = "all_to_all"
    """How tokens reach the experts of other ranks (mesh.ep). all_to_all: a row for each expert of a token, by one
    collective; deepep: once to each rank that has any of the token's experts, by DeepEP's kernels (DeepSeek-AI 2024),
    which are to be installed, in bfloat16 and on GPUs of compute capability 9.0."""


class RecomputeConfig(Config):
    every: NonNegativeInt = 0
    """Activation checkpointing of every k-th block: discard its activations and recompute them in backward. 0: save
    all."""
    granularity: Literal["full", "selective"] = "full"
    """Activations that such a block saves. full: its inputs only; selective: also the outputs of matmuls, attention and
    experts, so that only the cheap rest is recomputed."""
    offload: bool = False
    """Keep the inputs of recomputed blocks in CPU memory until backward, with granularity full: on a GPU pinned, and
    copied there and back beside the computation. It saves batch x length x width numbers on the device for each block
    and micro-batch that waits for its backward."""
    regather_sequence_parallel_input: bool = False
    """Save a rank's shard of the activations that tensor.sequence gathers into the other blocks' regions, and
    all-gather it again in backward (Korthikanti et al. 2022): a third more traffic over tp, and 1/tp of those
    activations."""
    reversible: bool = True
    """Free the inputs of reversible blocks (block.residual=reversible) in forward and reconstruct them in backward;
    false: save what other blocks save, the baseline for measurements."""
    renamed = {
        "keep": "granularity",
        "gathered": "regather_sequence_parallel_input",
    }

    @field_validator("granularity", mode="before")
    @classmethod
    def _old_value(cls, value: Any) -> Any:
        return (
            {"input": "full", "products": "selective"}.get(value, value)
            if isinstance(value, str)
            else value
        )


class ParallelConfig(Config):
    mesh: MeshConfig = MeshConfig()
    """Degrees of the mesh axes."""
    zero: ZeroConfig = ZeroConfig()
    """ZeRO: sharding over the data-parallel ranks."""
    tensor: TensorConfig = TensorConfig()
    """Tensor parallelism."""
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline parallelism."""
    context: ContextConfig = ContextConfig()
    """Context parallelism."""
    expert: ExpertConfig = ExpertConfig()
    """Expert parallelism."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activation checkpointing (recompute)."""
    compile: bool = False
    """Compile each block with torch.compile for training, and for evaluations on batches of training's shape. Batches
    of other shapes, generation and tasks run without: each shape would be compiled anew."""
    cuda_graphs: bool = False
    """Capture forward and backward of a micro-batch as a CUDA graph, whose kernels are launched at once: for small
    models, which wait for the launches. One process, samples of one length without masked documents, no dropout, no
    experts, no recomputation, no offload; with or without `compile`."""
    start_timeout_seconds: PositiveFloat = 600.0
    """`timeout_seconds` until the first step is done, and in evaluations and saves, which may compile or wait for
    disks. Ranks wait as long for one that does not start."""
    timeout_seconds: PositiveFloat = 120.0
    """Abort after this many seconds without progress in a step, naming the hung rank and the collective that others
    wait in."""
    io_timeout_seconds: PositiveFloat = 7200.0
    """Abort when ranks wait longer than this for one that prepares data, or reads or writes its shards of a checkpoint.
    A save may take any time while a rank writes; a rank that has ended is noticed at once."""

    @property
    def longest_timeout_seconds(self) -> float:
        """The time-out of what may take longer than a phase of a step."""
        return max(self.start_timeout_seconds, self.timeout_seconds)


class LossScaleConfig(Config):
    initial: PositiveFloat = 65536.0
    """Factor of the loss at the first step, a power of 2, so that scaling rounds nothing."""
    growth_interval: PositiveInt = 2000
    """Steps without an overflow after which the scale is doubled."""
    backoff: PositiveInt = 1
    """Powers of 2 by which an overflow lowers the scale: 1 halves it."""
    minimum: PositiveFloat = 1.0
    """Lowest scale, a power of 2. Gradients that overflow even so are not finite: train.nonfinite applies to them."""


Float8Scaling = Literal["tensor", "row", "mx"]
"""Numbers that share a scale: those of a tensor, of a row, or of 32 elements of a row (MXFP8)."""


class PrecisionConfig(Config):
    compute: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of activations and of parameters in use."""
    master: Literal["float64", "float32"] = "float32"
    """Dtype of stored parameters, gradients and optimizer states."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, which compute=float16 has (Micikevicius et al. 2018): the loss is multiplied by a scale
    before backward, and gradients are divided by it before they are clipped."""
    float8: Float8Scaling | None = None
    """Multiply linear maps, but not experts and the head, in float8 with a scale per tensor, per row, or per 32
    elements of a row (mx: MXFP8); null: in `compute`. Needs a GPU of compute capability 8.9 (row: 9.0, mx: 10.0). Each
    tp rank scales its own shard of a weight."""
    float8_kernel: Literal["torch", "torchao", "emulated"] = "torch"
    """Implementation of float8. torch: by its scaled matmul, tensor or row. torchao: its recipes tensorwise, rowwise
    (scales are powers of two) and MXFP8; `pip install 'torchao>=0.18,<0.19'`. emulated: casts to float8 and
    multiplies in float32, on any device, to see the numerics of a run before there is a GPU for it; slow."""
    float32_matmul: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matmuls in the process (`torch.set_float32_matmul_precision`): highest is float32, high may
    use TF32 on a GPU, medium bfloat16. It is for compute=float32, routers and other modules that keep float32."""
