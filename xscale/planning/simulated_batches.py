"""Batches of a simulated step: made as a run makes them, of samples without content, on fake tensors."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from xscale.data.samples.loader import FullSamples, Loader
from xscale.mesh.torch_private import FakeTensorMode
from xscale.nn.module import carried_tensors
from xscale.nn.segment_state import SEGMENT_STATE, SegmentStates
from xscale.nn.tokens import SharedValues, Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, SpecialTokens
from xscale.parallel.context.ring.document_runs import find_document_runs, share_document_runs
from xscale.parallel.context.sequence_sharding import SequenceSharding
from xscale.settings.settings import Settings
from xscale.step.batches import MicroBatches, shard_over_cp

TOKEN = 3
"""Token of the synthetic samples, which is no special one."""
DOCUMENT = 256
"""Length of a document in the synthetic samples."""


def fake_batches(
    batches: list[Batch],
    fake: FakeTensorMode,
    sharding: SequenceSharding | None,
    model: nn.Module,
    dtype: torch.dtype,
) -> list[Batch]:
    """Return this rank's parts of the batches on fake tensors, with the state between segments of a model."""
    sharded = [shard_over_cp(_faked(batch, fake), sharding) for batch in batches]
    return _with_segment_states(model, sharded, dtype)


def objective_of(settings: Settings, vocabulary: int) -> Objective:
    """Return the objective of a run whose tokenizer has that vocabulary size."""
    objective: Objective = OBJECTIVES.build(
        settings.objective,
        _specials(vocabulary),
        settings.data.source_length,
        settings.run.seed,
    )
    return objective


def _specials(vocabulary: int) -> SpecialTokens:
    """Special token ids of a tokenizer with that vocabulary size."""
    return SpecialTokens(vocabulary, 0, 1, 2, range(max(3, vocabulary - 100), vocabulary), bos=1)


def full_batch(settings: Settings, objective: Objective) -> Batch:
    """Make a micro-batch as a run does, of samples that are full and have no content."""
    traits, rows = OBJECTIVES.of(settings.objective).traits, settings.train.micro_batch_size
    data = FullSamples(settings.data, traits.samples, traits.labels, TOKEN, DOCUMENT)
    batches = MicroBatches(
        Loader(data),
        objective,
        micro_batch=rows,
        ranks=1,
        rank=0,
        seed=settings.run.seed,
        separate=not settings.data.cross_documents,
        device=torch.device("cpu"),
        steps=settings.train.steps,
    )
    batch = batches.make(batches.loader.samples(0, rows), 1, settings.train.batch_size, None)
    find_document_runs(batch.tokens, batch.source)
    return batch


def _with_segment_states(model: nn.Module, batches: list[Batch], dtype: torch.dtype) -> list[Batch]:
    """Return the batches with what the model keeps of their rows between segments, if it keeps anything."""
    if not (carried := carried_tensors(model)):
        return batches
    rows, device = len(batches[0].tokens.ids), torch.device("cpu")
    states = SegmentStates(carried, rows * len(batches), dtype=dtype, device=device)
    signals: list[dict[Any, Any]] = [
        {SEGMENT_STATE: states.of_rows(rows * number, rows)} for number in range(len(batches))
    ]
    return [
        replace(batch, tokens=batch.tokens.with_signals(signal))
        for batch, signal in zip(batches, signals, strict=True)
    ]


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    def put(tokens: Tokens | None) -> Any:
        if tokens is None:
            return None
        faked = tokens.map_tensors(fake.from_tensor, shared_values=SharedValues())
        share_document_runs(tokens, faked)
        if tokens.any_padding() is not None:
            # Parts that go without padding read on the host where samples end, which a fake tensor does not know.
            lengths = tokens.sample_lengths()
            faked.shared_values.get_or_compute("sample_lengths", lambda: lengths)
        return faked

    return Batch(put(batch.tokens), fake.from_tensor(batch.targets), put(batch.source))
