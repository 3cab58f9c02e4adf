"""Conformance of residual streams, in a stack of two blocks whose parts work on each token by itself."""

from typing import Any

import torch
from torch import Tensor

from xscale.conformance.check import check
from xscale.conformance.small_parts import VOCABULARY, WIDTH, close, dims, drawn, fitting, ready
from xscale.core.registry import Entry
from xscale.nn.blocks.block import BlockConfig, SublayerConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.tokens import Tokens

LENGTH = 7


def built(entry: Entry[Any]) -> Stack:
    """A stack of two blocks with two feed-forward parts each."""
    config = fitting(entry, dims(causal=False))
    ffn = SublayerConfig(part="ffn")
    block = BlockConfig(residual=config, sublayers=(ffn, ffn))
    return ready(Stack(StackConfig(depth=2, block=block), dims(causal=False)))


def states() -> Tensor:
    """Hidden states [2, T, D]."""
    return drawn(2, LENGTH, WIDTH)


def about(length: int = LENGTH) -> Tokens:
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))
    return Tokens.from_ids(ids)


def stream_after(stack: Stack, blocks: int, x: Tensor) -> Any:
    """The stream behind that many blocks."""
    stream = stack.stream.begin(x)
    for layer in range(blocks):
        stream = stack.blocks[str(layer)](stream, about(x.shape[1]))
    return stream


@check("residual", at_start=True)
def the_output_are_hidden_states(entry: Entry[Any]) -> None:
    stack, x = built(entry), states()
    for stream in (stream_after(stack, blocks, x) for blocks in range(3)):
        out = stack.stream.end(stream)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert stack(x, about()).shape == x.shape


@check("residual", at_start=True)
def the_stream_is_the_hidden_states_where_declared(entry: Entry[Any]) -> None:
    stack, x = built(entry), states()
    streams = [stream_after(stack, blocks, x) for blocks in range(3)]
    are_states = all(isinstance(stream, Tensor) and stream.shape == x.shape for stream in streams)
    begins_so = (
        are_states and close(streams[0], x) and close(stack.stream.end(streams[2]), streams[2])
    )
    assert begins_so == entry.traits.hidden_states
    assert entry.traits.hidden_states or entry.part.form, "`form` says what the stream is"


@check("residual")
def each_token_by_itself(entry: Entry[Any]) -> None:
    """Sequence and context parallelism give each rank some of the tokens."""
    stack, x = built(entry), states()
    expected = stack(x, about())
    parts = [stack(part, about(part.shape[1])) for part in torch.split(x, [3, 4], 1)]
    assert close(torch.cat(parts, 1), expected)


@check("residual")
def a_pipeline_sends_the_stream_whole(entry: Entry[Any]) -> None:
    stack, x = built(entry), states()
    expected, sublayers = stack(x, about()), 0
    for blocks in range(2):
        tensors = stack.stream.to_tensors(stream_after(stack, blocks, x))
        assert len(tensors) == stack.stream.sent(sublayers), (
            f"{len(tensors)} tensors behind {sublayers} sublayers"
        )
        assert all(tensor.shape == x.shape for tensor in tensors)
        stream = stack.stream.from_tensors(tuple(tensor.clone() for tensor in tensors))
        for layer in range(blocks, 2):
            stream = stack.blocks[str(layer)](stream, about())
        assert close(stack.output(stream, {}, about()), expected)
        sublayers += 2


@check("residual")
def gradients_reach_the_input_and_every_parameter(entry: Entry[Any]) -> None:
    stack, x = built(entry), states().requires_grad_()
    weights = drawn(*x.shape, seed=3)
    (stack(x, about()) * weights).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.abs().sum(-1).min() > 0)
    lacking = [name for name, parameter in stack.named_parameters() if parameter.grad is None]
    assert not lacking, f"no gradient: {', '.join(lacking)}"
