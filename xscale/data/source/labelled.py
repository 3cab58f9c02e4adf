"""Labelled texts in JSON lines, CSV, TSV or Parquet: a class or a score of one or two texts, or a tag for each word."""

import csv
import json
import math
from pathlib import Path
from typing import Any, Literal

import pydantic

from xscale.core.config import PositiveInt
from xscale.core.errors import nearest
from xscale.core.paths import PathTexts
from xscale.data.source.pairs import Bad, PairSource, Record
from xscale.data.source.source import SOURCES, FileSource, Labels, Source, SourceTraits

RESERVED_SCORE = -100.0
"""A score that would mean that there is no target."""


@SOURCES.register(
    "labelled", traits=SourceTraits(bounded=True, resumable=True, download=False, records="labels")
)
class Labelled(PairSource):
    class Config(FileSource.Config):
        paths: PathTexts = ()
        """Files (.jsonl, .csv, .tsv, plain, .gz or .zst; .parquet, .arrow), folders and globs. A folder stands for
        every such file below it. The first row of a .csv or .tsv file names its columns. One process reads such a
        file."""
        text_field: str = "text"
        """The key or column of the text. With tags it is a list of words, or a text with spaces between them."""
        pair_field: str | None = None
        """The key or column of a second text that is read after the first, as in entailment; null: there is none."""
        label_field: str = "label"
        """The key or column of the label."""
        labels: Literal["class", "score", "tags"] = "class"
        """Kind of the labels. class: one of `classes`. score: a number. tags: one of `classes` for each word, as a list
        or a text with spaces between them."""
        classes: tuple[str, ...] = ("negative", "positive")
        """Names of the classes or tags, in the order of their numbers; not read for scores."""
        group_field: str | None = None
        """The key or column of a text that examples of one group share, such as the original of augmented
        examples: a group is in one split, which the hash of that text decides; null: the hash of the example's own text
        does."""
        longest: PositiveInt = 16 << 20
        """Longest allowed line, in bytes."""

        @pydantic.model_validator(mode="after")
        def _fields_and_classes(self) -> "Labelled.Config":
            keys = (self.text_field, self.pair_field, self.label_field, self.group_field)
            fields = [name for name in keys if name is not None]
            if len(set(fields)) < len(fields):
                raise ValueError(
                    f"two of the fields are both '{max(fields, key=fields.count)}'; name different ones"
                )
            if self.labels == "tags" and self.pair_field is not None:
                raise ValueError("tags are those of the words of one text; leave `pair_field` out")
            if self.labels != "score" and len(set(self.classes)) < max(2, len(self.classes)):
                raise ValueError(
                    f"`classes` must be two or more different names, got {list(self.classes)}"
                )
            return self

    field_keys = ("text_field", "label_field")
    all_field_keys = (*field_keys, "pair_field", "group_field")

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        rows = [
            {"text": f"Line {number}. " * 40, "label": ("negative", "positive")[number % 3 == 0]}
            for number in range(size // 500 + 1)
        ]
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        with (folder / "b.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
        return cls.Config(paths=(str(folder),))

    @classmethod
    def labels(cls, config: Any) -> Labels:
        names = () if config.labels == "score" else config.classes
        return Labels(config.labels, names, config.pair_field is not None)

    def identity(self) -> dict[str, Any]:
        data = super().identity()
        # Data that was prepared before there were groups is that without them.
        if data["group_field"] is None:
            del data["group_field"]
        return data

    def record(self, data: dict[str, Any], bad: Bad) -> Record:
        group = None if self.config.group_field is None else self.text(data, "group_field", bad)
        if self.config.labels == "tags":
            words = self._words(data, "text_field", bad)
            tags = self._words(data, "label_field", bad)
            if len(words) != len(tags):
                what = f"the field '{self.config.text_field}' has {len(words)} words, and there are {len(tags)} tags"
                raise bad("another number of tags than words", what, "Give each word a tag.")
            return " ".join(words), None, None, tuple(self._class(tag, bad) for tag in tags), group
        second = None if self.config.pair_field is None else self.text(data, "pair_field", bad)
        value = self.value(data, "label_field", bad)
        label = (
            self._score(value, bad) if self.config.labels == "score" else self._class(value, bad)
        )
        return self.text(data, "text_field", bad), None, second, label, group

    def _class(self, value: Any, bad: Bad) -> int:
        name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if name in self.config.classes:
            return int(self.config.classes.index(name))
        what = f"the label {json.dumps(value)} is no class of data.source.classes"
        raise bad(
            "a label that is no class",
            what,
            nearest(str(name), self.config.classes) or "Add it to the classes.",
        )

    def _score(self, value: Any, bad: Bad) -> float:
        try:
            number = (
                float(value)
                if isinstance(value, str | int | float) and not isinstance(value, bool)
                else math.nan
            )
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and number != RESERVED_SCORE:
            return number
        what = f"the label {json.dumps(value)} is no score"
        raise bad(
            "a label that is no score",
            what,
            f"Write a finite number, other than {RESERVED_SCORE:g}.",
        )

    def _words(self, data: dict[str, Any], key: str, bad: Bad) -> list[str]:
        name, value = getattr(self.config, key), self.value(data, key, bad)
        if not isinstance(value, list):
            return self.text(data, key, bad).split()
        words = [self.text({name: word}, key, bad) for word in value]
        if any(word.split() != [word] for word in words) or not words:
            what = f"the field '{name}' must be a list of words without spaces, and not empty"
            raise bad(
                f"the field '{name}' is no list of words", what, "Split the text at its spaces."
            )
        return words
