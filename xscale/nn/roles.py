"""Roles: what a seam is, in a closed vocabulary. A class gives each of its seams one, as it gives parameters axes.

A class writes `seams = {"norm_all_heads": Role.NORM_OVER_HEADS}`, and the engine has one table for each kind of
parallelism from roles to what it puts there: it knows what a seam is, and not whose. A seam with a role that a table
does not have is left as it is by that kind of parallelism.

*Heads* are what tensor parallelism gives each rank some of in a mixer: attention heads, and where a part has none its
hidden units or channels. *Regions* are the parts of sublayers and the heads of models, inside which tp shards heads,
hidden units or the vocabulary; between them are norms, dropout and the residual stream, whose sequence is sharded with
sequence parallelism (sp). T is the length of the sequence, and P that of a rank's shard of it.
"""

from collections.abc import Mapping
from enum import Enum


class Role(Enum):
    """Role of a seam: the value says in a sentence what the seam is."""

    # Parameters and random numbers, of every module.
    PARAMETERS = (
        "what forward computes with of a stored parameter: its local shard, in compute dtype"
    )
    PARAMETERS_BETWEEN_REGIONS = (
        "what forward computes with of a parameter that is used for tokens between regions"
    )
    DRAWS = "random numbers, drawn for the full tensor and sliced, so that a layout does not change them"
    DRAWS_BETWEEN_REGIONS = (
        "random numbers of tensors between regions, whose sequence sp shards too"
    )

    # Heads and hidden units, which tp shards.
    FIRST_HEAD = "index in the model of the first local head, of the `heads` of all ranks"
    FIRST_HIDDEN = (
        "index in the model of the first local hidden unit, of the `hidden_units` of all ranks"
    )
    KV_PROJECTION = "projection to `kv_heads` heads, of which several ranks use one where there are fewer than ranks"
    HEAD_BIAS = "position that adds a bias to the scores of all heads, of which each rank has some"
    SCORE_BIAS = "(queries, keys) -> the bias of a position on the scores of all heads"
    NORM_OVER_HEADS = "(norm, x [..., H * K]) -> norm over the channels of all heads"
    SUM_OVER_HEADS = (
        "(terms of the local heads) -> their sum over all heads, which every rank then has"
    )

    # Regions of tp.
    REGION = "submodule x [B, T, D] -> [B, T, D] whose output is a sum over heads or hidden units"
    IN_REGION = "submodule that regions use and that does not belong to one, so that each rank has a part of its use"
    BETWEEN_REGIONS = "submodule that works on each token by itself between regions"
    BLOCK_POSITION = "position that a block adds to its input, between regions"
    POSITION_EMBEDDING = "(x, tokens) -> x with the encodings of the positions of its tokens"
    REPLICATED_INPUT = (
        "(x [B, T, D], tokens) -> x as a replicated module reads it, of all tokens that sp shards"
    )
    SHARD_OF_TOKENS = "(values of all tokens [B, T, ...]) -> those of the tokens that this rank has between regions"
    LOSS_FRACTION = "fraction of a loss that this rank computes the gradient of, where several compute it in full"

    # The vocabulary, which tp shards.
    VOCABULARY_LOOKUP = "(ids, table [V, D]) -> rows of a table over the vocabulary"
    VOCABULARY_LOSS = "(x, weight [V, D], targets) -> the cross-entropy over the vocabulary"
    VOCABULARY_ROWS = "(weight [V, D]) -> its rows that are tokens, without padding"

    # The sequence, which cp shards, and sp between regions.
    EMBEDDING = "(tokens) -> x [B, T, D], the start of the residual stream"
    EMBEDDING_OF_IDS = (
        "(table, ids [B, T]) -> x [B, T, D], further embeddings beside the residual stream"
    )
    GLOBAL_TOKENS = "tokens before the text at which a head predicts nothing"
    SEQUENCE_MIXING = "(x, tokens, ...) -> a mixer's output for the full sequence"
    ATTENTION = "(q, k, v, mask) -> o, the core: context parallelism has four styles for it"
    ATTENTION_MASK = "(q, k, tokens, key tokens) -> the mask of queries on keys"
    REUSED_ATTENTION = (
        "(v, tokens, key tokens, edge) -> o, attention by the scores of the layer before"
    )
    SCAN = "(recurrence, tokens) -> outputs of a state that passes from token to token"
    CONVOLUTION = "(u, tokens) -> a convolution as long as the sequence, by a state space model"
    NEIGHBOURS = "(x, tokens) -> x with the `left` tokens before it and the `right` ones after it"
    FULL_SEQUENCE = "(x, tokens) -> x of the full sequence [B, T, D], and the places [P] of this rank's tokens in it"
    CHANGED_SEQUENCE = (
        "(x, tokens, change) -> change(x, tokens) of the full sequence, which is then sharded anew"
    )
    FIRST_TOKEN = "(x, tokens) -> the state [B, D] of the text's first token"
    SUM_OVER_TOKENS = (
        "(sums over this rank's tokens) -> their sum over the sequence, "
        "of whose loss each rank has a part"
    )
    TOKENS_AHEAD = (
        "(tokens, targets, places) -> the ids and targets that stand so many places later"
    )
    TARGETS_AHEAD = "(tokens, targets) -> the targets after the next ones"

    # Experts, which ep shards.
    ROUTING = (
        "(x, tokens) -> the dispatch plan, a function of all tokens of a micro-batch in their order"
    )
    DISPATCH = "(rows by expert, tokens per expert, experts) -> the outputs of the experts, wherever they are"
    EXPERT_CALLS = (
        "(x, plan) -> the weighted outputs of the experts: permutation, dispatch and combination"
    )
    TOKEN_TABLE = "(row of a table by token id) -> the row, once the counts of ids have filled it"
    ASSIGNMENT = "(scores) -> a balanced assignment of tokens to experts"

    # The batch, which data parallelism shards.
    SUM_OVER_BATCH = "(sums over this rank's tokens) -> their sum over all tokens of the batch"
    NEGATIVES = "(states of this rank's sentences) -> those of the sentences of all ranks, and the first one's index"

    # Pipeline stages: what stands on some of them, and what passes between them.
    STACK_INPUT = (
        "(tokens) -> x at the start of a stack: later stages have what they receive in its place"
    )
    MODEL_OUTPUT = (
        "(x, ...) -> the model's output, of what the last stack returns: earlier stages send it on"
    )
    ON_FIRST_STAGE = "submodule that the first stage alone has"
    ON_LAST_STAGE = (
        "submodule that the last stage alone has; or (x, ...) -> x, with a loss that it alone has"
    )
    SENTENCE_LOSS = "loss whose other states, of sentences by themselves, pass through the stages as the text's do"
    STACK = "stack of blocks, which the stages divide"
    HANDED_ON = "() -> what the block before the first one hands on to it, beside the hidden states"
    STREAM_START = "(x) -> the residual stream before the first block of a stack"
    LAST_OUTPUT = "(x, ...) -> what a stack returns of its last block's output"

    # Engines that do not shard: kernels, number formats, recomputation, distillation.
    BLOCK_CALL = "(block, inputs) -> the block's outputs: activation checkpointing"
    RESIDUAL_SUM = "(stream, branch) -> their sum, whose memory reversible blocks free"
    LINEAR_MAP = "(x, weight, bias) -> x W^T + b: other number formats"
    KERNEL_PLAN = "plan of a kernel, built by the host"
    OBSERVED_INPUT = (
        "(x, tokens, q, k, v, mask) -> the heads' outputs: distillation reads the scores"
    )
    PREDICTION_LOSS = (
        "(x, weight, targets, tokens) -> the loss of a vocabulary: distillation adds a teacher's"
    )
    CLASS_LOSS = (
        "(outputs, targets, tokens) -> the loss of classes or scores: distillation adds a teacher's"
    )


Seams = Mapping[str, Role | None]
"""The seams that a class declares: attribute, method or submodule -> its role; None takes one of a base class back."""
