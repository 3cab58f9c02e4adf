"""Encoders whose sequence gets shorter between blocks: Funnel-Transformer and the distilling of Informer.

Dai et al. 2020 (Funnel-Transformer), section 2: before the first block of each stage the hidden states h are pooled by
windows of two tokens, h' = pool(h), the first token apart from the others. The queries and the residual of that block
are h', its keys and values h (section 2.2.1). For outputs at every token the decoder repeats the last states and adds
those of the first stage (section 2.2.2),

    g_i = h^M_{w(i)} + h^1_i,  w(i) the window of token i after all poolings,

and some more blocks read g.

Zhou et al. 2021 (Informer), equation 5, "distilling": X' = MaxPool(ELU(Conv1d(X))), the convolution over three tokens
with stride 1, the pooling over three with stride 2.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from xscale.core.choices import Choice
from xscale.core.config import Config, NonNegativeInt, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed, change, instead, take
from xscale.nn.attention.core import CORES
from xscale.nn.depth.depth_pass import DepthPass, DepthState, StackUse
from xscale.nn.depth.edges import mixers_of
from xscale.nn.depth.token_windows import Distilling, TokenWindows
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import hands_on_scores, without_scores
from xscale.nn.norm.norm import NORMS, NormSlot
from xscale.nn.position.position import POSITIONS
from xscale.nn.residual.residual_stream import RESIDUALS
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class SequencePoolingConfig(Config):
    before: tuple[PositiveInt, ...] = Field(min_length=1)
    """Blocks, numbered from 0, before which the sequence is shortened by half: the first blocks of all stages but the
    first."""
    method: Literal["mean", "max", "distill"] = "mean"
    """mean, max: the mean or maximum of two tokens (Dai et al. 2020); distill: a convolution over three tokens, ELU,
    and the maximum of three, every second of which begins a window (Zhou et al. 2021)."""
    separate_first: bool = True
    """Whether the first token, such as [CLS], is a window of its own; false with distill."""
    queries_only: bool = True
    """Whether the first block of a stage reads keys and values of the sequence before pooling; false with distill."""
    decoder_blocks: NonNegativeInt = 0
    """The last blocks, which read the full sequence: the repeated states plus those of the first stage. 0: the states
    of windows are the output, repeated for the head of an encoder."""
    norm: NormSlot | None = None
    """Norm between convolution and ELU, with distill: `batch` as in the code of Zhou et al.; null: none, as in their
    equation."""


class SequencePooling(DepthPass):
    """The poolings of a stack."""

    key = "pooling"
    seams = {"of_full_sequence": Role.CHANGED_SEQUENCE}
    reads_hidden_states = "windows of one are pooled between blocks"

    def __init__(
        self,
        config: SequencePoolingConfig,
        dims: Dims,
        *,
        repeats: bool = True,
        reads_distances: bool = False,
    ) -> None:
        """`repeats`: the output of a stack without a decoder are repeated states, one for each token.

        `reads_distances`: positions of the mixers add to the scores of attention.
        """
        super().__init__()
        self.reads_distances = reads_distances
        self.config = config
        self.depth = dims.depth
        self.repeats = repeats
        distills = config.before if config.method == "distill" else ()
        self.distilling = nn.ModuleDict(
            {str(layer): Distilling(dims, config.norm) for layer in distills}
        )

    def needs(self) -> list[KeyNeed]:
        received = "a stage would receive hidden states of another length than the sequence's"
        needs = [KeyNeed("parallel.mesh.pp", (1,), received, ((".", None),))]
        if any(NORMS.of(norm).traits.batch_statistics for norm in [self.config.norm] if norm):
            counted = (
                "the norm of distilling would count the tokens of a sequence once for each rank"
            )
            needs.append(KeyNeed("parallel.mesh.cp", (1,), counted, ((".norm", None),)))
        if self.reads_distances:
            distances = (
                "shards bias scores by differences of indices, which are no distances of windows"
            )
            edits = ((".", None), ("model.position", "learned"))
            needs.append(KeyNeed("parallel.mesh.cp", (1,), distances, edits))
        return needs

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "SequencePooling | None":
        if config.pooling is None:
            return None
        for layer in config.pooling.before if config.pooling.queries_only else ():
            block: Any = blocks[str(layer)]
            block.reads_memory |= {"mixer"}
        positions = [getattr(mixer, "position", None) for mixer in mixers_of(blocks.values())]
        distances = any(part and (part.adds_scores or part.adds_bias) for part in positions)
        return cls(config.pooling, dims, repeats=use.repeats_windows, reads_distances=distances)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        return (
            [] if config.pooling is None else check(config.pooling, config, dims, f"{path}.pooling")
        )

    def reads_full_sequence(self) -> str | None:
        return self.key

    def start(self, state: DepthState) -> None:
        assert state.tokens.forward.cache is None, "a shortened sequence has no incremental form"
        state.kept[self.key] = PooledStates(self, state.tokens)

    def before_block(self, state: DepthState) -> None:
        pooled: PooledStates = state.kept[self.key]
        state.x, state.memory, state.source = pooled.before_block(state.layer, state.x)
        state.tokens = pooled.stage_tokens

    def map_output(self, x: Any, state: DepthState) -> Any:
        pooled: PooledStates = state.kept[self.key]
        return pooled.repeat(x) if self.repeats and not self.config.decoder_blocks else x

    def token_fractions(self, fractions: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return token_fractions(self.config, len(fractions))

    def output_tokens(self, tokens: Tokens) -> Tokens:
        """Return the tokens of the last states: those of the windows, or `tokens` if there is a state for each."""
        if self.repeats or self.config.decoder_blocks:
            return tokens
        for _ in self.config.before:
            _, tokens = self.of_full_sequence(
                None, tokens, lambda x, full: (x, self.split(full).window_tokens(full))
            )
        return tokens

    def of_full_sequence(
        self,
        x: Tensor | None,
        tokens: Tokens,
        change: Callable[[Any, Tokens], tuple[Any, Tokens]],
    ) -> tuple[Any, Tokens]:
        """Return what `change` makes of x [B, T, D] and its tokens. A seam: a sequence may be sharded, and is anew."""
        return change(x, tokens)

    def split(self, tokens: Tokens) -> TokenWindows:
        """Split the tokens into windows."""
        return TokenWindows.split(
            tokens.ids.shape[1], tokens.ids.device, separate_first=self.config.separate_first
        )


class PooledStates:
    """Hidden states of a forward on their way through the stages."""

    def __init__(self, pooling: SequencePooling, tokens: Tokens) -> None:
        self._pooling, self._config = pooling, pooling.config
        self._decoder_begins = pooling.depth - pooling.config.decoder_blocks
        self.stage_tokens = self._all_tokens = tokens
        """Tokens of the present stage."""
        self._full_tokens: Tokens | None = None
        """Tokens of the full sequence, before any pooling."""
        self._window: Tensor | None = None
        """[T] window of each token of the full sequence."""
        self._first_stage: Tensor | None = None

    def before_block(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor | None, Tokens | None]:
        """Return the input [B, T', D] of block `layer` for the output x [B, T, D] of the one before, and what its keys
        and values are of, if not of that input: hidden states [B, T, D] and their tokens."""
        config = self._config
        if config.decoder_blocks and layer == self._decoder_begins:
            assert self._first_stage is not None
            x, self.stage_tokens = self.repeat(x) + self._first_stage, self._all_tokens
        if layer not in config.before:
            return x, None, None
        if self._first_stage is None:
            self._first_stage = x
        keys, key_tokens = x, self.stage_tokens
        x, self.stage_tokens = self._pooling.of_full_sequence(
            x, key_tokens, lambda x, tokens: self._shorten(layer, x, tokens)
        )
        return (x, keys, key_tokens) if config.queries_only else (x, None, None)

    def _shorten(self, layer: int, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """Return the states [B, T', D] and the tokens of the windows of x [B, T, D]."""
        self._full_tokens = self._full_tokens or tokens
        windows = self._pooling.split(tokens)
        if self._config.method == "distill":
            x = self._pooling.distilling[str(layer)](x, tokens, windows)
        else:
            x = windows.pool(x, tokens, self._config.method)
        self._window = windows.of if self._window is None else windows.of[self._window]
        return x, windows.window_tokens(tokens)

    def repeat(self, x: Tensor) -> Tensor:
        """States of windows [B, T', D] -> the state of each token's window [B, T, D]; of a window that begins in
        another document zeros."""
        repeated: Tensor = self._pooling.of_full_sequence(x, self.stage_tokens, self._repeat)[0]
        return repeated

    def _repeat(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        full = self._full_tokens
        assert self._window is not None
        assert full is not None
        x = x[:, self._window]
        if full.documents is None:
            return x, full
        assert tokens.documents is not None
        same = tokens.documents[:, self._window] == full.documents
        return x.masked_fill(~same[..., None], 0.0), full


def token_fractions(config: SequencePoolingConfig, depth: int) -> list[tuple[float, float]]:
    """Return the fractions of a sequence's tokens that are queries, and that are keys, of each of `depth` blocks."""
    fractions, now = [], 1.0
    for layer in range(depth):
        keys = now
        if layer in config.before:
            now /= 2
        elif layer == depth - config.decoder_blocks:
            now = 1.0
        fractions.append((now, keys if layer in config.before and config.queries_only else now))
    return fractions


def check(config: SequencePoolingConfig, stack: Any, dims: Dims, path: str) -> list[Problem]:
    """List why the blocks of `stack` cannot pass on a shorter sequence; `path` is that of the pooling."""
    where = path.rpartition(".")[0]
    reasons: list[tuple[bool, str, tuple[Choice, ...]]] = [
        (dims.causal, "a window has a later token for its first, and this model is causal", ()),
        (
            stack.halting is not None,
            "tokens of a halting stack stay apart",
            take(None, key=f"{where}.halting"),
        ),
        (
            stack.exits is not None,
            "an exit predicts at every token",
            take(None, key=f"{where}.exits"),
        ),
        (
            stack.mask_decoder is not None,
            "its last block decodes tokens",
            take(None, key=f"{where}.mask_decoder"),
        ),
        (
            hands_on_scores(stack),
            "scores that blocks hand on are of all tokens",
            without_scores(stack),
        ),
        (
            stack.block.gates is not None,
            "gates spend the budget of all tokens in every block",
            take(None, key=f"{where}.block.gates"),
        ),
    ]
    problems = [
        Problem(path, what, choices=take(None) + choices)
        for is_so, what, choices in reasons
        if is_so
    ]
    last = stack.depth - config.decoder_blocks
    if sorted(set(config.before)) != list(config.before) or config.before[-1] >= last:
        what = (
            f"{list(config.before)} are not ascending blocks from 1 on, before the decoder's: "
            f"a stack of depth={stack.depth} has blocks 0 to {stack.depth - 1}"
        )
        ascending = sorted({layer for layer in config.before if layer < last}) or [
            max(1, last // 2)
        ]
        most = stack.depth - 1 - min(config.before[-1], stack.depth - 1)
        fewer = take(*range(min(most, config.decoder_blocks), -1, -1), key=f"{path}.decoder_blocks")
        problems.append(Problem(f"{path}.before", what, choices=take(ascending) + fewer))
    if config.method == "distill":
        what = "the convolution reads all tokens, and its output is what a block attends to"
        choices = take(False) + take("mean", key=f"{path}.method")
        for name in ("separate_first", "queries_only"):
            if getattr(config, name):
                problems.append(Problem(f"{path}.{name}", what, choices=choices))
    elif config.norm is not None:
        choices = take(None) + take("distill", key=f"{path}.method")
        problems.append(Problem(f"{path}.norm", "only distill has a norm", choices=choices))
    if config.norm is not None:
        problems += NORMS.of(config.norm).part.check(config.norm, dims, f"{path}.norm")
    return problems + _check_blocks(config, stack, dims, path)


def _check_blocks(
    config: SequencePoolingConfig, stack: Any, dims: Dims, path: str
) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for layer in range(config.before[0], stack.depth - config.decoder_blocks):
        block = stack.block_config(layer)
        for mixer in block.mixers():
            position = getattr(mixer, "position", None) or dims.position
            core = getattr(mixer, "core", None)
            if core is None or position is None or not CORES.of(core).part.uses_relative_bias:
                continue
            if POSITIONS.of(position).traits.where == "bias":
                what = f"core '{core.kind}' counts distances in windows, and position '{position.kind}' in tokens"
                choices = instead("core", core.kind, ["softmax"])
                choices += instead("position", str(position.kind), ["rope", "learned"])
                problems[what] = Problem(path, what, choices=choices)
        if layer in config.before and config.queries_only:
            for what, choices in _unpoolable(block, path.rpartition(".")[0]):
                all_queries = take(False) + choices
                problems[what] = Problem(f"{path}.queries_only", what, choices=all_queries)
    return list(problems.values())


def _unpoolable(block: Any, path: str) -> list[tuple[str, tuple[Choice, ...]]]:
    """List why the first mixer of a block of the stack at `path` cannot have fewer queries than keys, each with the
    changes that may end it."""
    reasons: list[tuple[str, tuple[Choice, ...]]] = []
    first, mixer = block.listed()[0], block.config_of(block.listed()[0])
    if first.part != "mixer" or mixer.kind != "attention" or mixer.shared_qk:
        what = "the first block of a stage begins with attention that has fewer queries than keys"
        attention = (f"{path}.block.mixer.kind", "attention")
        apart = (f"{path}.block.mixer.shared_qk", False)
        reasons.append((what, change(attention) + change(attention, apart)))
    elif not CORES.of(mixer.core).part.traits_of(mixer.core).cross:
        what = f"core '{mixer.core.kind}' has as many queries as keys"
        reasons.append((what, instead("core", mixer.core.kind, CORES.able(cross=True))))
    stream = RESIDUALS.of(block.residual)
    if stream.part.joins_sublayers:
        usual = [stream.part.instead(block.residual)]
        what = f"the block's residual is '{stream.name}'"
        reasons.append((what, instead("residual", stream.name, usual)))
    if block.position is not None:
        what = "block.position is added to a block's input, and the keys of the first block of a stage are not of it"
        reasons.append((what, take(None, key=f"{path}.block.position")))
    return reasons
