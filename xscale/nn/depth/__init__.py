"""Passes over the depth of a stack, beside its blocks: one a file; here are their list and their config keys.

A new pass is a file with a `DepthPass`, its key in `DepthConfig` and its line in `PASSES`.
"""

from xscale.core.config import Config
from xscale.nn.depth.depth_pass import DepthPass
from xscale.nn.depth.edges import FirstValues, PreviousScores
from xscale.nn.depth.exits import Exits
from xscale.nn.depth.exits_config import ExitsConfig
from xscale.nn.depth.gates import GateBudget
from xscale.nn.depth.halting import Halting, HaltingConfig
from xscale.nn.depth.layer_mix import LayerMix, ReturnedStates
from xscale.nn.depth.linear_maps import QuaternionMaps
from xscale.nn.depth.mask_decoder import MaskDecoder, MaskDecoderConfig
from xscale.nn.depth.quaternion import LinearMaps
from xscale.nn.depth.segment_memory.feedback import FeedbackConfig, FeedbackMemory
from xscale.nn.depth.segment_memory.memory import SegmentMemory, SegmentMemoryConfig
from xscale.nn.depth.segment_memory.summary import SegmentSummary, SegmentSummaryConfig
from xscale.nn.depth.sequence_pooling import SequencePooling, SequencePoolingConfig
from xscale.nn.depth.sharing import Share, SharedSublayers
from xscale.nn.depth.step_signal import StepSignal

PASSES: tuple[type[DepthPass], ...] = (
    MaskDecoder,
    QuaternionMaps,
    SharedSublayers,
    PreviousScores,
    FirstValues,
    LayerMix,
    SequencePooling,
    SegmentMemory,
    SegmentSummary,
    FeedbackMemory,
    StepSignal,
    Halting,
    Exits,
    ReturnedStates,
    GateBudget,
)
"""All passes, in the order in which each of their hooks is called."""


class DepthConfig(Config):
    """Keys of a stack that choose its passes."""

    share: Share = "none"
    """The sublayers whose parameters all blocks have in common: none, all (Dehghani et al. 2019; ALBERT, Lan et al.
    2020), or as in ALBERT's ablation the mixer, with cross-attention, or the ffn; norms go with their sublayer."""

    linear_maps: LinearMaps = "real"
    """The linear maps of attention and feed-forward parts: real, or quaternion, by the Hamilton product with a quarter
    of the weights (Tay et al. 2019)."""
    step_signal: bool = False
    """Whether sinusoids of the position and of the block's number are added to the hidden states before each block
    (Dehghani et al. 2019, Universal Transformer)."""
    halting: HaltingConfig | None = None
    """Adaptive computation time (Graves 2016): each block is a step, after which tokens may halt; null: all tokens go
    through all blocks."""
    exits: ExitsConfig | None = None
    """Heads after inner blocks, whose losses are added to that of the model's head (early exit); null: none."""

    pooling: SequencePoolingConfig | None = None
    """Shortens the sequence of an encoder between blocks (Dai et al. 2020, Funnel-Transformer; the distilling of Zhou
    et al. 2021, Informer); null: all blocks read all tokens."""
    segment_memory: SegmentMemoryConfig | None = None
    """Hidden states of the segments before that attention reads beside those of its own (Dai et al. 2019,
    Transformer-XL); null: none."""
    segment_summary: SegmentSummaryConfig | None = None
    """One vector of the segment before, a mean over tokens and blocks, that one block attends to (Yoshida et al.
    2020); null: none."""
    feedback: FeedbackConfig | None = None
    """One memory of all blocks at earlier tokens, which all blocks attend to, a token at a time (Fan et al. 2020,
    Feedback Transformer); null: each block attends to its own input."""
    mask_decoder: MaskDecoderConfig | None = None
    """The last block of an encoder decodes masked tokens: its queries get absolute positions, and it is applied several
    times to the output of the block before (He et al. 2021, DeBERTa); null: it is a block as the others."""
