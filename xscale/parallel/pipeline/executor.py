"""Executor of a pipeline schedule: this rank's forwards and backwards, and the P2P communication between them.

Torch's schedule runtime is not used, only two of its functions and two of its tables. It passes every stage slices of
one batch, while here a micro-batch has its own dropout seed, documents and weight of auxiliary losses, and a loss that
is divided by the targets of the whole step; and it fixes shapes once, while evaluation and generation use others.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xscale.mesh.mesh import Mesh
from xscale.nn.head.sentence_contrast import SENTENCES, contrasts_sentences
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.tokens import Tokens
from xscale.parallel.config import ParallelConfig, PipelineConfig
from xscale.parallel.context.sequence_sharding import TokenShard
from xscale.parallel.pipeline.microbatch_runner import MicrobatchRunner
from xscale.parallel.pipeline.p2p import P2PChannel, TensorSpec
from xscale.parallel.pipeline.schedule import Action, ActionTable, schedule_of
from xscale.parallel.pipeline.split import split, stages_of_shared_params
from xscale.parallel.pipeline.stage import PipelineStage, make_stage
from xscale.parallel.pipeline.stubs import StageInput
from xscale.parallel.shard.sharded import StagedModel, sharded_parameters


class MicroBatch(Protocol):
    """A micro-batch; every stage has all of it."""

    @property
    def tokens(self) -> Tokens: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def source(self) -> Tokens | None: ...


LossFunction = Callable[[nn.Module, Any], Any]
"""Calls a model on a batch."""
Phase = Callable[[str], AbstractContextManager[None]]
"""Times its body under a name."""


@dataclass(frozen=True)
class PipelineSpec:
    """Description of all stages of a pipeline."""

    config: PipelineConfig
    stages: int
    width: int
    """D of the hidden states that are sent."""
    inputs: list[list[StageInput]]
    """For each stage the tensors that it receives."""
    stages_of_shared_params: dict[str, list[int]]
    """Name of each parameter of which several stages have copies -> those stages."""
    zero: int
    """ZeRO stage."""
    length_of: Callable[[int], int] = field(default=lambda length: length)
    """Tokens of a rank of cp, with global ones -> those of a rank between blocks."""
    global_tokens: int = 0
    """Tokens that the model prepends to each sequence."""
    tp: int = 1
    """Ranks among which the heads of attention scores, and of values, are sharded."""

    def rank_of(self, stage: int, ranks: int) -> int:
        return schedule_of(self.config).rank_of(stage, ranks)

    def received(
        self, stage: int, tokens: Tokens, source: Tokens | None, dtype: torch.dtype
    ) -> list[TensorSpec]:
        """Describe what a stage receives for a micro-batch, and whose gradients it sends back.

        `dtype` is that of hidden states; attention scores and residual streams have float32 at least.
        """
        specs = []
        for sent in self.inputs[stage]:
            read = source if sent.from_source else tokens
            assert read is not None
            batch, length = len(read.ids), self._local_length(read)
            precise = torch.promote_types(dtype, torch.float32)
            if sent.sentences:
                sentences = tokens.get(SENTENCES)
                if sentences is not None and contrasts_sentences(tokens):
                    texts, count, words = sentences.shape
                    length = self.length_of(self.global_tokens + words)
                    specs.append(TensorSpec((texts * count, length, self.width), dtype))
                continue
            if sent.per_token:
                specs.append(TensorSpec((batch, self.length_of(length)), precise))
                continue
            if sent.values:
                specs.append(TensorSpec((batch, length, self.width // self.tp), dtype))
                continue
            if sent.score_heads is None:
                shape: tuple[int, ...] = (batch, self.length_of(length), self.width)
                if sent.states is not None:
                    shape = (sent.states, *shape)
                specs.append(TensorSpec(shape, precise if sent.precise else dtype))
                continue
            queries = length
            # With a cache the tokens are the last ones of the sequence.
            keys = queries if tokens.forward.cache is None else int(tokens.positions[0, -1]) + 1
            shape = (batch, sent.score_heads // self.tp, queries, keys)
            specs.append(TensorSpec(shape, precise))
        return specs

    def _local_length(self, tokens: Tokens) -> int:
        """Return the number of tokens of a rank of cp between embedding and head, with global tokens and padding."""
        if isinstance(tokens, TokenShard):
            return tokens.sharding.local_length(self.global_tokens + tokens.length)
        return self.global_tokens + tokens.ids.shape[1]


class Pipeline(StagedModel):
    """This rank's stages as one model: its forward passes through all stages of all ranks, without gradients."""

    def __init__(
        self,
        stages: list[PipelineStage],
        spec: PipelineSpec,
        channel: P2PChannel,
        group: dist.ProcessGroup,
    ) -> None:
        """`group` has all ranks of pp; the last stage broadcasts logits over it."""
        copies = {name: len(indices) for name, indices in spec.stages_of_shared_params.items()}
        super().__init__([stage.model for stage in stages], copies)
        self.stages = {stage.index: stage for stage in stages}
        self.spec = spec
        self.channel = channel
        self.group = group
        self._trained_shapes: set[tuple[Any, ...]] = set()
        """Shapes of the micro-batches of the steps so far."""

    def connect(self) -> None:
        """Create the communicators of all pairs of ranks whose stages exchange messages. Collective over pp."""
        spec, ranks = self.spec, self.channel.count
        pairs = [
            (spec.rank_of(stage - 1, ranks), spec.rank_of(stage, ranks))
            for stage in range(1, spec.stages)
        ]
        for stages in spec.stages_of_shared_params.values():
            pairs += itertools.combinations([spec.rank_of(stage, ranks) for stage in stages], 2)
        self.channel.connect(pairs)

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        """Return logits [B, T, V] on every rank; with `targets` the loss on the last stage's rank, 0 on the others."""
        assert not torch.is_grad_enabled(), "training goes through `step`"
        spec, channel = self.spec, self.channel
        output: Any = None
        for index, stage in self.stages.items():
            if index:
                previous = spec.rank_of(index - 1, channel.count)
                key = ("E", index)
                if previous != channel.rank:
                    channel.expect_recv(
                        previous, key, spec.received(index, tokens, source, channel.dtype)
                    )
                stage.feed(channel.recv(previous, key))
            output = stage.model(tokens, targets, source)
            stage.clear()
            if not stage.last:
                receiver = spec.rank_of(index + 1, channel.count)
                channel.send(
                    receiver, ("E", index + 1), self._checked_outputs(index, tokens, source, output)
                )
        # Some sends stay in flight, so that the next batch can start here while this one is in later stages.
        channel.wait_sends(keep=2 * channel.count)
        return self._broadcast_output(output, targets, tokens)

    def wait_sends(self) -> None:
        # A message whose sender has not waited for it outlives its group: a process that ends then may crash.
        self.channel.wait_sends()

    def report_waits(self, report: Callable[[object | None], object]) -> None:
        self.channel.on_wait = report

    def _checked_outputs(
        self, index: int, tokens: Tokens, source: Tokens | None, output: Any
    ) -> list[Tensor]:
        """Return a stage's outputs as a list, of the shapes and dtypes that the next stage expects."""
        outputs = list(output) if isinstance(output, tuple) else [output]
        for tensor, expected in zip(
            outputs, self.spec.received(index + 1, tokens, source, self.channel.dtype), strict=True
        ):
            actual = TensorSpec(tuple(tensor.shape), tensor.dtype)
            assert actual == expected, (
                f"stage {index} returned {actual}, and the next stage expects {expected}"
            )
        return outputs

    def _broadcast_output(self, output: Any, targets: Tensor | None, tokens: Tokens) -> Tensor:
        last = self.spec.rank_of(self.spec.stages - 1, self.channel.count)
        device, is_last = self.channel.device, self.channel.rank == last
        if targets is not None:
            loss: Tensor = output if is_last else torch.zeros((), device=device)
            return loss
        shape = torch.zeros(3, dtype=torch.long, device=device)
        if is_last:
            shape = torch.tensor(output.shape, device=device)
        source = dist.get_global_rank(self.group, last)
        dist.broadcast(shape, source, group=self.group)
        logits = (
            output
            if is_last
            else torch.empty(shape.tolist(), dtype=self.channel.dtype, device=device)
        )
        logits = logits.contiguous()
        dist.broadcast(logits, source, group=self.group)
        # The last stage has answered, so every message has arrived.
        self.wait_sends()
        return logits

    def step(
        self, batches: Sequence[MicroBatch], loss: LossFunction, weight: float, phase: Phase
    ) -> Tensor:
        """Run forward and backward of a step's micro-batches; return the sum of this rank's losses.

        Losses are divided by `weight` before backward.
        """
        table = schedule_of(self.spec.config).table(
            self.spec.config, self.channel.count, len(batches)
        )
        actions = table[self.channel.rank]
        runner = MicrobatchRunner(self.stages, loss, weight, self.spec.zero, batches, actions)
        self._expect_messages(table, batches)
        prefetch = self._has_trained(batches)
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            with phase("communicate"):
                received = self._recv_inputs(action)
                if prefetch and following is not None:
                    # The inputs of the next action may arrive while this one computes.
                    self._post_recv(following)
            with phase("forward" if action.kind == "F" else "backward"):
                result = runner.run(action, received)
            self._send_result(action, result, batches[action.micro])
        with phase("communicate"):
            self.channel.wait_sends()
            assert self.channel.is_drained(), "a message was announced and not received"
            self._all_reduce_shared_grads()
        return runner.nats

    def _has_trained(self, batches: Sequence[MicroBatch]) -> bool:
        """Return whether a step had micro-batches of these shapes, and remember them.

        Kernels are loaded, compiled and given memory in the first one. That can wait for everything on the device, and
        a receive that was posted early would block it, since its sender may wait for this rank.
        """
        shapes = tuple(
            (
                tuple(batch.tokens.ids.shape),
                None if batch.source is None else tuple(batch.source.ids.shape),
            )
            for batch in batches
        )
        known = shapes in self._trained_shapes
        self._trained_shapes.add(shapes)
        return known

    def _expect_messages(self, table: ActionTable, batches: Sequence[MicroBatch]) -> None:
        """Announce to the channel every message that the other ranks' actions send to this one."""
        for source, actions in enumerate(table):
            if source == self.channel.rank:
                continue
            for action in actions:
                stage = _receiver(action, self.spec.stages)
                if stage in self.stages:
                    batch = batches[action.micro]
                    shaped_as = stage if action.kind == "F" else action.stage
                    sent = self.spec.received(
                        shaped_as, batch.tokens, batch.source, self.channel.dtype
                    )
                    self.channel.expect_recv(
                        source, (_direction(action), stage, action.micro), sent
                    )

    def _sender(self, action: Action) -> int | None:
        """Return the stage whose message an action needs."""
        if action.kind == "W":
            return None
        other = action.stage + (-1 if action.kind == "F" else 1)
        return other if 0 <= other < self.spec.stages else None

    def _post_recv(self, action: Action) -> None:
        sender = self._sender(action)
        if sender is not None:
            source = self.spec.rank_of(sender, self.channel.count)
            self.channel.post_recv(source, (_direction(action), action.stage, action.micro))

    def _recv_inputs(self, action: Action) -> list[Tensor]:
        sender = self._sender(action)
        if sender is None:
            return []
        source = self.spec.rank_of(sender, self.channel.count)
        return self.channel.recv(source, (_direction(action), action.stage, action.micro))

    def _send_result(self, action: Action, result: Any, batch: MicroBatch) -> None:
        stage = _receiver(action, self.spec.stages)
        if stage is None:
            return
        if action.kind == "F":
            outputs = self._checked_outputs(action.stage, batch.tokens, batch.source, result)
            result = [output.detach() for output in outputs]
        receiver = self.spec.rank_of(stage, self.channel.count)
        self.channel.send(receiver, (_direction(action), stage, action.micro), result)

    def _all_reduce_shared_grads(self) -> None:
        """Sum the gradients of parameters of which several stages have copies, in the same order on each of them."""
        shared = self.spec.stages_of_shared_params
        # State that no gradient changes, such as a router's loads, follows statistics that all stages have.
        parameters = [
            parameter
            for parameter in sharded_parameters(self)
            if parameter.name in shared and parameter.parameter.requires_grad
        ]
        for parameter in sorted(parameters, key=lambda parameter: parameter.name):
            name, gradient = parameter.name, parameter.gradient
            assert gradient is not None, f"{name} has no gradient on this rank"
            ranks = [self.spec.rank_of(stage, self.channel.count) for stage in shared[name]]
            assert len(set(ranks)) == len(ranks), "a rank has two copies"
            peers = [rank for rank in ranks if rank != self.channel.rank]
            for rank in peers:
                spec = TensorSpec(tuple(gradient.shape), gradient.dtype)
                self.channel.expect_recv(rank, ("S", name, rank), [spec])
                self.channel.send(rank, ("S", name), [gradient.clone()])
            gradients = {rank: self.channel.recv(rank, ("S", name, rank))[0] for rank in peers}
            gradients[self.channel.rank] = gradient.clone()
            gradient.copy_(gradients[ranks[0]])
            for rank in ranks[1:]:
                gradient += gradients[rank]
        self.channel.wait_sends()


def _direction(action: Action) -> str:
    """Return F or B; how a backward is split does not matter to messages."""
    return "F" if action.kind == "F" else "B"


def _receiver(action: Action, stages: int) -> int | None:
    """Return the stage that an action's result is sent to."""
    if action.kind == "W":
        return None
    other = action.stage + (1 if action.kind == "F" else -1)
    return other if 0 <= other < stages else None


def apply(
    model: nn.Module, mesh: Mesh, config: ParallelConfig, compute: torch.dtype, length: int
) -> Pipeline:
    """Split the depth into stages; `length` is that of a sequence (0: unknown)."""
    assert mesh.dense is not None, "a single process has one stage"
    schedule, pp = schedule_of(config.pipeline), mesh.degrees.pp
    count = schedule.stages(config.pipeline, pp)
    blocks = split(model, config.pipeline, count, length)
    shared = stages_of_shared_params(model, blocks)
    stages = [make_stage(copy.deepcopy(model), blocks, index) for index in range(count)]
    global_tokens = global_tokens_of(model)
    sequence_shards = mesh.degrees.tp if config.tensor.sequence else 1
    spec = PipelineSpec(
        config.pipeline,
        count,
        width=model.get_submodule("head").width,  # type: ignore[arg-type]
        inputs=[stage.inputs for stage in stages],
        stages_of_shared_params=shared,
        zero=config.zero.stage,
        length_of=lambda tokens: -(-tokens // sequence_shards),
        global_tokens=global_tokens,
        tp=mesh.degrees.tp,
    )
    rank = mesh.degrees.coordinate(mesh.rank_info.rank, "pp")
    local = [stage for stage in stages if schedule.rank_of(stage.index, pp) == rank]
    pipeline = Pipeline(local, spec, P2PChannel(mesh, compute), mesh.dense["pp"].get_group())
    pipeline.connect()
    return pipeline
