"""A file of labelled examples with new ones, in which words are replaced (Jiao et al. 2020, TinyBERT); it resumes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.merge_shards import check_skipped, skipped_sentence
from xscale.data.corpus.shards import corpus_hash, labels_of
from xscale.data.progress import ProgressBar
from xscale.data.source.labelled import Labelled
from xscale.data.source.source import (
    SOURCES,
    Document,
    FileSource,
    Labels,
    Source,
    validation_below,
)
from xscale.run.load_run import LoadedRun, load_run
from xscale_tinybert.augment import Augmentation, Augmenter, NumberedText, WordCounts
from xscale_tinybert.fill_masks import MaskFiller, check_fills_masks, model_input
from xscale_tinybert.resumable_file import ResumableFile
from xscale_tinybert.word_vectors import WordVectors, read_word_vectors

ENDING = ".jsonl"
GROUP = "original"
"""Field with the text of the original, unless the source has groups already."""
EXAMPLES = 128
"""Examples that are augmented together, and after which the state is saved."""


@dataclass(frozen=True)
class AugmentRequest:
    """A labelled source to augment, and by what."""

    data: DataConfig
    output: Path
    model: Path
    """Run of the masked language model."""
    vectors: Path | None
    """File of word vectors; None: words of several pieces stay."""
    settings: Augmentation
    rows: int = 32
    """Rows of a forward of the model."""
    plugins: bool = False


@dataclass(frozen=True)
class SourceFacts:
    """Facts of the examples, known after they are read once."""

    examples: int
    training_bytes: int
    """Bytes of the texts that are augmented."""
    validation_below: int
    """Examples whose split hash is less are in the validation split, and are not augmented."""


def augment_data(request: AugmentRequest, *, progress: bool = True) -> list[str]:
    """Write the examples of the source to a JSON-lines file, those of the training split followed by their new ones.

    An interrupted job resumes. Returns sentences on what was written. ConfigError for a source without labels, a model
    that predicts no masked words, and an example that cannot be read, with its file and line.
    """
    labels = _check(request)
    source: Source = SOURCES.build(request.data.source)
    facts = _read_facts(source, request.data)
    skipped = check_skipped(request.data.source, source.skipped, facts.examples)
    if (request.model / "config.json").is_file() and not (request.model / "config.yaml").is_file():
        what = "this is a folder of transformers, and no run"
        raise ConfigError(
            str(request.model),
            what,
            f"Make one of it: xscale checkpoint import {request.model} RUN.",
        )
    loaded = load_run(request.model, plugins=request.plugins)
    if problems := check_fills_masks(loaded.settings, loaded.tokenizer, "--model"):
        raise ConfigError(problems)
    request.output.parent.mkdir(parents=True, exist_ok=True)
    with ResumableFile(request.output, _identity(request, loaded)) as file:
        state = file.state or {
            "examples": 0,
            "lines": 0,
            "bytes": 0,
            "counts": asdict(WordCounts()),
        }
        vectors = None if request.vectors is None else read_word_vectors(request.vectors)
        augmenter = _make_augmenter(request, loaded, vectors)
        augmenter.counts = WordCounts(**state["counts"])
        if state["examples"] and progress:
            print(
                f"{file.partial}: resuming after {state['examples']:,} examples",
                file=sys.stderr,
                flush=True,
            )
        lines = _write(request, augmenter, labels, facts, file, state, progress)
        file.finish()
    sentences = [f"data.source: {skipped_sentence(skipped)}"] if skipped else []
    return [
        *sentences,
        *_summary(request, facts, lines, augmenter.counts),
        *source_section(request, labels),
    ]


def _check(request: AugmentRequest) -> Labels:
    """Return the labels of the source; ConfigError for a source, an output or fields that cannot be."""
    data = request.data
    labels = labels_of(data)
    if data.prepared is not None or data.blend:
        key = "data.prepared" if data.prepared is not None else "data.blend"
        raise ConfigError(
            key,
            "it has tokens, and texts are augmented",
            "Give data.source=labelled with its files.",
        )
    if labels is None:
        kinds = ", ".join(entry.name for entry in SOURCES if entry.traits.records == "labels")
        what = f"the documents of the source '{data.source.kind}' have no labels"
        raise ConfigError("data.source", what, f"Take one of: {kinds}.")
    if request.output.suffix != ENDING:
        what = f"the file is written as JSON lines, and '{request.output.name}' has another ending"
        raise ConfigError("--output", what, f"Give a name that ends in {ENDING}.")
    if request.vectors is not None and not request.vectors.is_file():
        raise ConfigError(
            "--vectors", f"there is no file {request.vectors}", "Give a text file of word vectors."
        )
    if _fields(data)["group"] in (_fields(data)[key] for key in ("text", "pair", "label")):
        what = f"a field has the name '{GROUP}', under which the originals are written"
        raise ConfigError("data.source", what, "Rename it in the files.")
    return labels


def _fields(data: DataConfig) -> dict[str, str | None]:
    """Return the names of the fields of the output: those of the source's, which may have none of its own."""
    config = data.source
    named = config if isinstance(config, Labelled.Config) else Labelled.Config()
    group = named.group_field or GROUP
    return {
        "text": named.text_field,
        "pair": named.pair_field,
        "label": named.label_field,
        "group": group,
    }


def _read_facts(source: Source, data: DataConfig) -> SourceFacts:
    """Read all examples once: a bad one is refused before the work begins."""
    below = validation_below(data.validation)
    examples, size, lowest, validation, lowest_size = 0, 0, 1 << 64, 0, 0
    for document in source.documents():
        examples += 1
        if (split_hash := document.split_hash) < below:
            validation += 1
            continue
        size += _size(document)
        if split_hash < lowest:
            lowest, lowest_size = split_hash, _size(document)
    if examples == 0:
        raise ConfigError(
            "data.source", "the source has no examples", "Name files that contain some."
        )
    if data.validation and not validation:
        # Preparation holds this example out, so that there is a validation split.
        return SourceFacts(examples, size - lowest_size, lowest + 1)
    return SourceFacts(examples, size, below)


def _size(document: Document) -> int:
    return sum(
        len(text.encode("utf-8")) for text in (document.text, document.second) if text is not None
    )


def _make_augmenter(
    request: AugmentRequest, loaded: LoadedRun, vectors: WordVectors | None
) -> Augmenter:
    fill_masks = MaskFiller(loaded.model, loaded.mesh.device, request.rows)
    reads = model_input(loaded.settings, loaded.tokenizer)
    return Augmenter(loaded.tokenizer, reads, fill_masks, vectors, request.settings)


def _identity(request: AugmentRequest, loaded: LoadedRun) -> dict[str, Any]:
    """Return JSON data on which the output depends: an interrupted job resumes if it is the same."""
    source: Source = SOURCES.build(request.data.source)
    vectors = (
        None if request.vectors is None else [str(request.vectors), request.vectors.stat().st_size]
    )
    return {
        "data.source": encode(request.data.source),
        "corpus": corpus_hash(source.byte_ranges()),
        "data.validation": request.data.validation,
        "--model": [str(request.model), loaded.step, loaded.tokenizer.fingerprint],
        "--vectors": vectors,
        **{f"--{key}": value for key, value in asdict(request.settings).items()},
    }


def _write(
    request: AugmentRequest,
    augmenter: Augmenter,
    labels: Labels,
    facts: SourceFacts,
    file: ResumableFile,
    state: dict[str, Any],
    progress: bool,
) -> int:
    """Write the examples after those of `state`; return the number of lines of all."""
    source: Source = SOURCES.build(request.data.source)
    numbered = islice(enumerate(source.documents()), state["examples"], None)
    lines, done_bytes = int(state["lines"]), int(state["bytes"])
    title = f"augmenting {facts.examples - state['examples']:,} examples"
    with ProgressBar(title, facts.training_bytes - done_bytes, shown=progress) as bar:
        while chunk := list(islice(numbered, EXAMPLES)):
            training = [
                (number, document) for number, document in chunk if _is_training(document, facts)
            ]
            copies = iter(_new_texts(augmenter, training))
            written = []
            for _, document in chunk:
                texts = next(copies) if _is_training(document, facts) else []
                originals = [(document.text, document.second)]
                written += [
                    _line(document, labels, request.data, *text) for text in originals + texts
                ]
            size = sum(_size(document) for _, document in training)
            lines, done_bytes = lines + len(written), done_bytes + size
            done = {"examples": chunk[-1][0] + 1, "lines": lines, "bytes": done_bytes}
            file.append("".join(written), {**done, "counts": asdict(augmenter.counts)})
            bar.advance(size)
    return lines


def _is_training(document: Document, facts: SourceFacts) -> bool:
    return document.split_hash >= facts.validation_below


def _new_texts(
    augmenter: Augmenter, examples: list[tuple[int, Document]]
) -> Iterator[list[tuple[str, str | None]]]:
    """Yield the new texts of each numbered example: pairs, the second None where an example has one text."""
    texts = [
        NumberedText(number, position, text)
        for number, document in examples
        for position, text in enumerate((document.text, document.second))
        if text is not None
    ]
    copies = iter(augmenter.augment(texts))
    for _, document in examples:
        first = next(copies)
        second: list[str] | list[None] = (
            [None] * len(first) if document.second is None else next(copies)
        )
        yield list(zip(first, second, strict=True))


def _line(
    document: Document, labels: Labels, data: DataConfig, text: str, second: str | None
) -> str:
    """Return the line of an example with the texts `text` and `second` and the label of `document`."""
    label = document.label
    assert label is not None, f"{document.name} has no label"
    named: Any = label
    if isinstance(label, tuple):
        named = [labels.names[tag] for tag in label]
    elif isinstance(label, int):
        named = labels.names[label]
    fields = _fields(data)
    values = {fields["text"]: text, fields["pair"]: second, fields["label"]: named}
    values[fields["group"]] = document.text if document.group is None else document.group
    values.pop(None, None)
    return json.dumps(values, ensure_ascii=False) + "\n"


def _summary(
    request: AugmentRequest, facts: SourceFacts, lines: int, counts: WordCounts
) -> Iterator[str]:
    """Yield sentences on what was written."""
    new = lines - facts.examples
    yield f"{request.output}: {lines:,} examples, {new:,} of them new"
    replaced = counts.by_model + counts.by_vectors
    if words := replaced + counts.kept + counts.without_vector:
        by = f"{counts.by_model:,} by the model and {counts.by_vectors:,} by vectors"
        yield f"words: {replaced / words:.1%} of {words:,} replaced, {by}"
    if counts.without_vector:
        why = (
            "there are no vectors (--vectors)"
            if request.vectors is None
            else f"{request.vectors} has none of theirs"
        )
        yield f"words: {counts.without_vector:,} of several pieces stay, as {why}"


def source_section(request: AugmentRequest, labels: Labels) -> Iterator[str]:
    """Yield the section of the config that reads the output."""
    config, section = request.data.source, Labelled.Config()
    names = {f"{key}_field": name for key, name in _fields(request.data).items()}
    changes: dict[str, Any] = {"paths": (str(request.output),), "labels": labels.kind, **names}
    changes |= {"classes": labels.names} if labels.names else {}
    if isinstance(config, FileSource.Config):
        changes |= {"bad": config.bad, "max_bad_fraction": config.max_bad_fraction}
    written, defaults = encode(section.model_copy(update=changes)), encode(section)
    changed = {
        key: value for key, value in written.items() if key == "kind" or value != defaults[key]
    }
    text = yaml.safe_dump(
        {"data": {"source": changed}}, default_flow_style=True, sort_keys=False, width=float("inf")
    )
    yield f"read by: {text.strip()}"
