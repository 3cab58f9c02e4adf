"""Sentences on the labelled examples of a run: their number, what is truncated, and the baseline that reads no text."""

import numpy as np
from numpy.typing import NDArray

from xscale.data.corpus.labels import NO_TAG, decode_labels
from xscale.data.indexed import IndexedDataset
from xscale.data.samples.labelled import LabelledDataset
from xscale.data.samples.loader import Corpus
from xscale.data.source.source import Labels


def label_notes(corpus: Corpus) -> list[str]:
    """Describe the examples of `corpus` and the baseline; empty unless its examples have labels."""
    datasets = [loader.data for loader in (corpus.train, corpus.validation) if loader is not None]
    labelled = [dataset for dataset in datasets if isinstance(dataset, LabelledDataset)]
    if not labelled:
        return []
    train = labelled[0]
    counts = f"{len(train)} labelled examples for training"
    if len(labelled) == 2:
        counts += f" and {len(labelled[1])} for validation"
    truncated = f"truncated: {train.truncated()} of the former to {train.sample_length} tokens"
    notes = [f"data {counts}; {truncated} (data.sequence_length)"]
    return (
        [*notes, baseline_sentence(train.labels, train.column, labelled[1].column)]
        if len(labelled) == 2
        else notes
    )


def baseline_sentence(labels: Labels, train: IndexedDataset, held_out: IndexedDataset) -> str:
    """Return the quality on held-out labels of what reads no text: the most frequent class, or the mean score."""
    known, unseen = (_values(column, labels) for column in (train, held_out))
    if labels.kind == "score":
        error = float(np.square(unseen - known.mean()).mean())
        return f"baseline: the mean score {known.mean():.4f} has a squared error of {error:.4f} on validation"
    most_frequent = int(np.bincount(known, minlength=len(labels.names)).argmax())
    accuracy = float((unseen == most_frequent).mean())
    name = "tag" if labels.kind == "tags" else "class"
    label = labels.names[most_frequent]
    return f"baseline: the most frequent {name} '{label}' has accuracy {accuracy:.4f} on validation"


def _values(column: IndexedDataset, labels: Labels) -> NDArray[np.float64] | NDArray[np.int64]:
    values = decode_labels(column.tokens, labels)
    return values[values != NO_TAG] if labels.kind == "tags" else values
