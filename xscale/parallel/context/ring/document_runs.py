"""Runs of tokens of one document in packed sequences, on the host: the rectangles in which a ring attends to documents.

Queries of a run see the keys of the runs of the same document. Within a rank's own tokens that is a causal square;
against tokens before them it is a rectangle without a mask. So fused kernels attend to packed documents without a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from xscale.nn.tokens import Tokens
from xscale.parallel.context.sequence_sharding import SequenceSharding

_KEY = "document_runs"


@dataclass(frozen=True)
class DocumentRun:
    """Adjacent tokens of one document, positions `start` to `stop` - 1 of the full sequence."""

    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class FlashPart:
    """Some queries and some keys of two shards, of some samples: a call of a fused kernel."""

    rows: slice
    columns: slice
    causal: bool
    """Whether a query sees only the keys up to its own index; otherwise it sees all."""
    sample: int | None = None
    """None: all samples."""

    @property
    def samples(self) -> slice:
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


def document_runs(tokens: Tokens) -> list[list[DocumentRun]]:
    """Return the runs of each sample, in order."""
    assert tokens.documents is not None, "the sequences are not packed"
    documents = tokens.documents
    runs: list[list[DocumentRun]] = tokens.shared_values.get_or_compute(
        _KEY, lambda: _find_runs(documents)
    )
    return runs


def find_document_runs(*sequences: Tokens | None) -> None:
    """Find the runs of packed sequences while they are on the CPU: for those on a GPU the host would wait."""
    for tokens in sequences:
        if tokens is not None and tokens.documents is not None:
            document_runs(tokens)


def share_document_runs(source: Tokens, target: Tokens) -> None:
    """Give `target`, a copy of the tokens `source` without their shared values, the runs of `source`."""
    if source.documents is not None:
        target.shared_values.get_or_compute(_KEY, lambda: document_runs(source))


def _find_runs(documents: Tensor) -> list[list[DocumentRun]]:
    """Runs of each row of documents [B, T]."""
    runs_of_rows = []
    for row in documents:
        starts = [0, *((row[1:] != row[:-1]).nonzero()[:, 0] + 1).tolist()]
        stops = [*starts[1:], len(row)]
        numbers = row[starts].tolist()
        runs_of_rows.append([DocumentRun(*run) for run in zip(starts, stops, numbers, strict=True)])
    return runs_of_rows


def parts_of_documents(
    sharding: SequenceSharding,
    owner: int,
    queries: list[list[DocumentRun]],
    keys: list[list[DocumentRun]],
    lengths: tuple[int, int],
    *,
    causal: bool,
) -> list[FlashPart]:
    """Return the parts of this rank's queries and `owner`'s keys in which every pair is visible but for causal order.

    `queries` and `keys` are the runs of each sample; `lengths` those of the full sequences of queries and keys, which
    are the same in a causal one.
    """
    parts = []
    for sample, (of_queries, of_keys) in enumerate(zip(queries, keys, strict=True)):
        rows = [*_local_runs(sharding, sharding.rank, lengths[0], of_queries)]
        columns = [*_local_runs(sharding, owner, lengths[1], of_keys)]
        for query, first_row in rows:
            for key, first_column in columns:
                if key.document != query.document or (causal and key.start >= query.stop):
                    continue
                same = causal and key.stop > query.start
                assert not same or key == query, "runs are cut at the same positions"
                count, width = query.stop - query.start, key.stop - key.start
                parts.append(
                    FlashPart(
                        slice(first_row, first_row + count),
                        slice(first_column, first_column + width),
                        same,
                        sample,
                    )
                )
    return parts


def _local_runs(
    sharding: SequenceSharding, rank: int, length: int, runs: list[DocumentRun]
) -> Iterator[tuple[DocumentRun, int]]:
    """Yield what a rank's tokens have of each run, with its index in the rank's shard."""
    size, (first, second) = sharding.chunk_length(length), sharding.rank_chunks(rank)
    # Adjacent chunks are one range, which cuts no run in two.
    ranges = [(first, 2, 0)] if second == first + 1 else [(first, 1, 0), (second, 1, size)]
    for chunk, count, index in ranges:
        begin, end = chunk * size, min((chunk + count) * size, length)
        for run in runs:
            start, stop = max(run.start, begin), min(run.stop, end)
            if start < stop:
                yield DocumentRun(start, stop, run.document), index + start - begin
