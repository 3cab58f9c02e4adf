"""Training of a tokenizer on a deterministic sample of the corpus."""

import hashlib
import heapq
from collections.abc import Iterator

from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import prepared_folder
from xscale.data.parallel_map import run_in_process
from xscale.data.progress import ProgressBar
from xscale.data.source.source import SOURCES, ByteRange, Source, validation_below
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer

READ_FACTOR = 8
"""Bytes read from a large corpus, as a multiple of the sample's bytes."""
IN_PROCESS_SIZE = 1 << 20
"""A tokenizer is trained on more characters than this in a process of its own. It may take minutes, in a library that
does not notice Ctrl-C."""


def train_tokenizer(config: DataConfig, *, progress: bool = True) -> Tokenizer:
    """Train the config's tokenizer on its source, without validation documents, and write it to the data folder."""
    part = TOKENIZERS.of(config.tokenizer).part
    folder = prepared_folder(config)
    wanted = part.sample_bytes(config.tokenizer)
    if wanted:
        folder.mkdir(parents=True, exist_ok=True)
        texts = sample_documents(config, wanted, progress=progress)
        size = sum(map(len, texts))
        title = f"training the tokenizer ({part.Config.kind}) on {size / 1e6:.1f} MB"
        with ProgressBar(title, None, shown=progress) as bar:
            if size <= IN_PROCESS_SIZE:
                part.train(config.tokenizer, texts, folder)
            else:
                run_in_process(
                    part.train, (config.tokenizer, texts, folder), lambda: bar.advance(0)
                )
    tokenizer: Tokenizer = part(config.tokenizer, folder)
    return tokenizer


def sample_documents(config: DataConfig, size: int, *, progress: bool = False) -> list[str]:
    """Return about `size` bytes of training documents, those with the lowest hashes, in the corpus's order."""
    source: Source = SOURCES.build(config.source)
    below = validation_below(config.validation)
    heap: list[tuple[int, int, str]] = []
    total = 0
    ranges = _sampled_ranges(source, size * READ_FACTOR)
    with ProgressBar(
        "reading a sample for the tokenizer", sum(part.size for part in ranges), shown=progress
    ) as bar:
        for order, (rank, text) in enumerate(_hashed_documents(source, ranges, bar)):
            if rank < below:
                continue
            heapq.heappush(heap, (-rank, order, text))
            total += len(text)
            while total - len(heap[0][2]) >= size:
                total -= len(heapq.heappop(heap)[2])
    return [text for _, _, text in sorted(heap, key=lambda item: item[1])]


def _sampled_ranges(source: Source, size: int) -> list[ByteRange]:
    """Return all byte ranges, or for a large corpus those with the lowest hashes up to `size` bytes."""
    ranges = source.byte_ranges()
    if sum(part.size for part in ranges) <= size:
        return ranges
    ranked = sorted(
        ranges, key=lambda part: hashlib.blake2b(f"{part.file}:{part.start}".encode()).digest()
    )
    taken = set()
    for part in ranked:
        taken.add(part)
        size -= part.size
        if size <= 0:
            break
    return [part for part in ranges if part in taken]


def _hashed_documents(
    source: Source, ranges: list[ByteRange], bar: ProgressBar
) -> Iterator[tuple[int, str]]:
    for byte_range in ranges:
        for document in source.read(byte_range):
            text = (
                document.text if document.target is None else f"{document.text}\n{document.target}"
            )
            yield document.split_hash, text
        bar.advance(byte_range.size)
