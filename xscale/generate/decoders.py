"""Decoders, which compute the next logits of a generation: over growing caches, static caches, or no cache."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.generate.segment_decoder import SegmentDecoder
from xscale.mesh.collectives import sum_scalars
from xscale.nn.blocks.block import Block
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, ExitPolicyConfig
from xscale.nn.forward import Forward
from xscale.nn.head.head import ONLY_LAST_LOGITS
from xscale.nn.mixer.kv_cache import CAPACITY, StaticKvCache
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.model import MODELS, Model
from xscale.nn.module import Module
from xscale.nn.signals import Signal
from xscale.nn.tokens import SharedValues, Tokens
from xscale.parallel.cuda_graph import CudaGraph

CacheKind = Literal["auto", "growing", "static"]
LISTED_PARTS = 3
"""Parts without a static form that a message names."""


@dataclass(frozen=True)
class Decoding:
    """How the steps of a generation are computed."""

    cache: CacheKind = "auto"
    """static: attention keeps keys and values in buffers of a fixed capacity, so that all steps have the same shapes;
    growing: in buffers that grow; auto: static on CUDA, where a step is captured as a CUDA graph, and where the step is
    compiled, if the whole model has a static form; else growing."""
    compile: bool = False
    """Whether torch.compile compiles the step, once; it needs the static cache."""
    say: Callable[[str], None] = field(default=lambda line: None)
    """Told in a line how the steps are computed, and which parts of the model have no static form."""
    decoder: "StaticDecoder | None" = None
    """A decoder of the model, with room for the generation, whose step may be captured or compiled already; None: each
    generation makes its own."""

    signals: Callable[[Tensor], Mapping[Signal[Any], Tensor]] | None = None
    """From the ids [T] of a text so far to signals of all its tokens [1, T, ...], which every step is given; None: no
    part reads any."""

    def check(self) -> None:
        """Refuse what contradicts itself: ConfigError."""
        if self.compile and self.cache == "growing":
            what = "a step over a growing cache has other shapes after each token, and would be compiled for each"
            raise ConfigError("--compile", what, "Take --cache static or auto, or leave it out.")


class StepDecoder(Protocol):
    """The model during one generation."""

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits [V] of the token after ids [T]: at the first call the prompt, then one more at each."""


class GrowingDecoder:
    """The mixers keep keys, values and states that grow; without an incremental form each call reads all ids."""

    def __init__(
        self,
        model: nn.Module,
        source: Tokens | None,
        policy: ExitPolicyConfig | None,
        *,
        prefix: bool,
        device: torch.device,
        signals: Callable[[Tensor], Mapping[Signal[Any], Tensor]] | None = None,
    ) -> None:
        self.model, self.source = model, source
        self.policy, self.prefix, self.signals = policy, prefix, signals
        self.cache: dict[str, Any] | None = {} if all_incremental(model, device) else None
        self.prompt = self.done = 0

    def next_logits(self, ids: Tensor) -> Tensor:
        first = self.done if self.cache is not None else 0
        self.prompt = self.prompt or len(ids)
        positions = torch.arange(first, len(ids), device=ids.device)[None]
        tokens = Tokens(ids[None, first:], positions, forward=Forward(cache=self.cache))
        tokens = tokens.with_signals({ONLY_LAST_LOGITS: True})
        if self.prefix and first == 0:
            tokens = replace(tokens, prefix=positions < self.prompt)
        if self.signals is not None:
            of_text = self.signals(ids).items()
            tokens = tokens.with_signals({signal: value[:, first:] for signal, value in of_text})
        if self.policy is not None:
            tokens = tokens.with_signals({EARLY_EXIT: EarlyExit(self.policy)})
        logits: Tensor = self.model(tokens, None, self.source)
        self.done = len(ids)
        return logits[0, -1]


class StaticDecoder:
    """A model over KV caches of a fixed capacity, for the samples of a batch, whose prompts may differ in length.

    A step reads an id and a position of each sample from buffers that stay in place, and writes keys and values at the
    positions: all steps have the same shapes. On CUDA the step is captured as a CUDA graph, compiled or not.
    """

    def __init__(
        self,
        model: nn.Module,
        capacity: int,
        *,
        compiled: bool = False,
        source: Tokens | None = None,
        prefix: bool = False,
    ) -> None:
        """`capacity`: tokens of the longest sample, with its prompt. `source`: tokens of an encoder-decoder. `prefix`:
        whether the tokens of a prompt see each other in both directions."""
        assert not list(why_not_static(model)), "parts of the model have no static form"
        self.model, self.source = model, source
        self.compiled, self.prefix = compiled, prefix
        # A row of one key would be an attention without a mask.
        self.cache = static_cache(model, max(capacity, 2))
        self._run: Callable[[], Any] | None = None
        self._begins = True
        self.captures = any(parameter.is_cuda for parameter in model.parameters())
        """Whether steps are a CUDA graph."""
        self.ids = self.next_positions = torch.empty(0)

    def begin(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Read prompts [B, T]; return the logits [B, V] of the tokens behind them.

        Another generation of as many samples may begin with the same decoder, without a source, and its steps are those
        that were captured or compiled. `lengths` [B]: tokens of each prompt, before its padding; None: T.
        """
        tokens = Tokens.from_ids(ids, cache=self.cache, signals={ONLY_LAST_LOGITS: lengths is None})
        if self.prefix:
            ends = ids.shape[1] if lengths is None else lengths[:, None]
            tokens = replace(tokens, prefix=tokens.positions < ends)
        logits: Tensor = self.model(tokens, None, self.source)
        if lengths is None:
            lengths = torch.full_like(ids[:, 0], ids.shape[1])
        else:
            logits = logits.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, logits.shape[2]))
        if self._run is None:
            self.ids, self.next_positions = torch.zeros_like(ids[:, :1]), lengths[:, None].clone()
        else:
            # What was captured reads these buffers.
            self.next_positions.copy_(lengths[:, None])
        return logits[:, -1]

    def step(self, ids: Tensor) -> Tensor:
        """Read the next token [B] of each sample; return the logits [B, V] of those behind them."""
        self.ids.copy_(ids[:, None])
        if self._run is None:
            self._run = self._prepare()
        logits: Tensor = self._run()
        self.next_positions.add_(1)
        return logits[:, -1]

    def next_logits(self, ids: Tensor) -> Tensor:
        """Return the logits [V] of the token after ids [T]: at the first call the prompt, then one more at each."""
        if self._begins:
            self._begins = False
            return self.begin(ids[None])[0]
        return self.step(ids[-1:])[0]

    def restart(self) -> None:
        """Take the next ids of `next_logits` for a prompt."""
        assert self.source is None, "the keys of a source are those of one generation"
        self._begins = True

    def _prepare(self) -> Callable[[], Any]:
        """Return what computes a step: as it is, compiled, or as a CUDA graph of either."""
        before = {path: id(state) for path, state in _states(self.cache)}
        # A step has the same effect each time that it is computed, because it writes at positions.
        self._compute()
        after = {path: id(state) for path, state in _states(self.cache)}
        assert before == after, "a part of the model replaces its state, and has no static form"
        compute = self._compute
        if self.compiled:
            compute = torch.compile(compute, dynamic=False, fullgraph=True)
        return CudaGraph(compute).replay if self.captures else compute

    def _compute(self) -> Tensor:
        # The compiler traces no default factory of a dataclass that is a class of ours.
        shared, forward = SharedValues(), Forward(cache=self.cache)
        tokens = Tokens(self.ids, self.next_positions, forward=forward, shared_values=shared)
        tokens = tokens.with_signals({ONLY_LAST_LOGITS: True})
        logits: Tensor = self.model(tokens, None, self.source)
        return logits


def _states(cache: dict[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the objects and tensors of a cache, by path."""
    for key, value in cache.items():
        if isinstance(value, dict):
            yield from _states(value, f"{path}/{key}")
        elif isinstance(value, StaticKvCache):
            yield from ((f"{path}/{key}/{name}", getattr(value, name)) for name in ("k", "v"))
        elif isinstance(value, tuple):
            yield from ((f"{path}/{key}/{n}", tensor) for n, tensor in enumerate(value))
        else:
            yield f"{path}/{key}", value


def static_cache(model: nn.Module, capacity: int) -> dict[str, Any]:
    """Return the cache of a forward in which attention has room for `capacity` tokens."""
    cache: dict[str, Any] = {CAPACITY: capacity}
    for module in model.modules():
        if isinstance(module, Block) and module.has_own_cache:
            cache[module.path] = {CAPACITY: capacity}
    return cache


def why_not_static(model: nn.Module) -> Iterator[str]:
    """Yield the path of each part of the model whose step of generation has no static form, with the reason."""
    if not isinstance(model, Model) or not MODELS.get(str(model.Config.kind)).traits.decode:
        yield f"the model: {type(model).__name__} generates no text token by token"
        return
    if global_tokens_of(model):
        yield "the model: its positions begin behind global tokens"
    for path, module in model.named_modules():
        if path.partition(".")[0] not in model.computed_once and isinstance(module, Module):
            why = module.why_not_static()
            if why is not None:
                yield f"{path}: {why}"


def incremental(model: nn.Module) -> bool:
    """Whether every mixer decodes incrementally; otherwise each token costs a forward over the full sequence."""
    return all(module.decodes for module in model.modules() if isinstance(module, Mixer))


def all_incremental(model: nn.Module, device: torch.device) -> bool:
    """Whether every mixer of all ranks decodes incrementally. Collective: a pipeline rank has some of the blocks, and
    all ranks must make the same decision."""
    return sum_scalars([float(not incremental(model))], device)[0] == 0


def make_decoder(
    model: nn.Module,
    capacity: int,
    decoding: Decoding,
    *,
    device: torch.device,
    source: Tokens | None,
    policy: ExitPolicyConfig | None,
    prefix: bool,
    segment: int | None = None,
) -> StepDecoder:
    """Return the decoder that `decoding` asks for; ConfigError where it asks for a static form that there is not.

    `segment`: tokens of a segment, for a model that keeps a state between segments; None: it keeps none.
    """
    if decoding.decoder is not None:
        decoding.decoder.restart()
        return decoding.decoder
    decoding.check()
    must_be_static = decoding.cache == "static" or decoding.compile
    growing: StepDecoder = GrowingDecoder(
        model, source, policy, prefix=prefix, device=device, signals=decoding.signals
    )
    if segment is not None:
        assert decoding.signals is None, "a step over segments is given no signals"
        growing = SegmentDecoder(model, segment, incremental=all_incremental(model, device))
    if not must_be_static and (decoding.cache == "growing" or device.type != "cuda"):
        return growing
    reasons = list(_why_growing(model, policy, device))
    if reasons:
        listed = "; ".join(reasons[:LISTED_PARTS])
        if len(reasons) > LISTED_PARTS:
            listed += f"; and {len(reasons) - LISTED_PARTS} more"
        if must_be_static:
            option = "--compile" if decoding.compile else "--cache"
            fix = "Take --cache growing, without --compile."
            raise ConfigError(option, f"no static step: {listed}", fix)
        decoding.say(f"growing caches, no CUDA graph: {listed}")
        return growing
    form = "is a CUDA graph" if device.type == "cuda" else "has the same shapes"
    compiled = ", compiled" if decoding.compile else ""
    decoding.say(f"static KV cache of {capacity} tokens; each step {form}{compiled}")
    return StaticDecoder(model, capacity, compiled=decoding.compile, source=source, prefix=prefix)


def _why_growing(
    model: nn.Module, policy: ExitPolicyConfig | None, device: torch.device
) -> Iterator[str]:
    """Yield why a generation has no static steps: parts of the model, exits, ranks."""
    yield from why_not_static(model)
    if any(type(parameter.data) is not Tensor for parameter in model.parameters()):
        yield "the model: its parameters are sharded"
    if policy is not None:
        yield "tokens leave by exits, so that steps compute other blocks (--no-exits computes all)"
    if sum_scalars([1.0], device)[0] > 1:
        yield "the model is on several ranks"
