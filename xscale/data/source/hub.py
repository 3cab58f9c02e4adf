"""A dataset of the Hugging Face hub by its name, or of a local folder, streamed by the library `datasets`."""

import hashlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pydantic

from xscale.core.config import PositiveInt
from xscale.core.errors import ConfigError
from xscale.core.paths import PathText
from xscale.data.source.columns import STREAMED, check_text, require_column
from xscale.data.source.source import (
    SOURCES,
    BadDocumentError,
    ByteRange,
    Document,
    FileSource,
    Source,
    SourceTraits,
)

NOMINAL_BYTES = 64 << 20
"""Size that a shard counts as where the library does not know that of the split."""


@SOURCES.register("hub", traits=SourceTraits(bounded=True, resumable=True, download=True))
class Hub(FileSource):
    class Config(FileSource.Config):
        dataset: PathText = ""
        """Name of a dataset of the Hugging Face hub, such as HuggingFaceFW/fineweb, or the path of a local folder of
        data files that the library `datasets` opens. Rows are read as they arrive; only their token ids are stored."""
        subset: str | None = None
        """Subset of the dataset, such as sample-10BT; null: the only one."""
        split: str = pydantic.Field(default="train", min_length=1)
        """Split of the dataset. Validation documents are chosen from it, as from any source."""
        revision: str | None = None
        """Commit, tag or branch of the dataset; null: the newest commit when the data is prepared."""
        field: str = "text"
        """The column whose value is the document."""
        max_shards: PositiveInt | None = None
        """Most shards (data files) to read, the first ones; null: all."""
        longest: PositiveInt = 256 << 20
        """Longest allowed document, in bytes."""

    @classmethod
    def example_in(cls, folder: Path, size: int) -> Source.Config:
        import pyarrow
        import pyarrow.parquet

        (folder / "data").mkdir(exist_ok=True)
        for number in range(3):
            texts = [f"Line {row} of {number}. " * 40 for row in range(size // 2000 + 1)]
            file = folder / "data" / f"train-{number:05d}-of-00003.parquet"
            pyarrow.parquet.write_table(
                pyarrow.table({"text": texts}), file, compression="none", row_group_size=700
            )
        return cls.Config(dataset=str(folder))

    def byte_ranges(self) -> list[ByteRange]:
        config = self.config
        if not config.dataset:
            fix = "Give the name of a dataset, such as HuggingFaceFW/fineweb, or a local folder."
            raise ConfigError("data.source.dataset", "is empty", fix)
        version = self._version()
        dataset = _opened(config, version)
        require_column(config.field, dataset.column_names, config.dataset, "data.source.field")
        shards = dataset.num_shards
        name = f"{STREAMED}{config.dataset}/{config.subset or 'default'}/{config.split}@{version}"
        split = (dataset.info.splits or {}).get(config.split)
        total = getattr(split, "num_bytes", None) or sum(
            file.stat().st_size for file in self._local_files()
        )
        size = max(1, total // shards) if total else NOMINAL_BYTES
        count = shards if config.max_shards is None else min(shards, config.max_shards)
        # A shard is read as a whole; its bytes are an estimate, by which processes share the work.
        return [
            ByteRange(f"{name}#{number}", 0, size, is_full_file=True) for number in range(count)
        ]

    def read(self, byte_range: ByteRange) -> Iterator[Document]:
        name, _, number = byte_range.file.rpartition("#")
        config = self.config
        dataset = _opened(config, name.rpartition("@")[2])
        shard = dataset.shard(num_shards=dataset.num_shards, index=int(number)).select_columns(
            [config.field]
        )
        for row, values in enumerate(_rows(shard, config.dataset)):
            text = values[config.field]
            try:
                check_text(text, byte_range.file, row, config.field, config.longest)
            except BadDocumentError as error:
                self.skip(error)
                continue
            if text and not text.isspace():
                yield Document(f"{byte_range.file}:{row}", text)

    def _local_files(self) -> list[Path]:
        """Return the files of a local folder, without those that `hf download` keeps for itself; empty for a name."""
        folder = Path(self.config.dataset)
        files = (
            sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
        )
        return [
            file
            for file in files
            if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ]

    def _version(self) -> str:
        """Return the commit of the hub's dataset, or a hash of the names and sizes of a local folder's files."""
        folder = Path(self.config.dataset)
        if folder.is_dir():
            sizes = (
                (file.relative_to(folder), file.stat().st_size) for file in self._local_files()
            )
            text = "\n".join(f"{file}\t{size}" for file, size in sizes)
            return hashlib.blake2b(os.fsencode(text), digest_size=8).hexdigest()
        _require_library()
        from huggingface_hub import HfApi

        try:
            return str(HfApi().dataset_info(self.config.dataset, revision=self.config.revision).sha)
        except (
            Exception
        ) as error:  # those of the HTTP client have no common base with the hub's own
            raise _unreadable(self.config.dataset, error) from None


def _opened(config: Hub.Config, version: str) -> Any:
    """Open the dataset as a stream; ConfigError where it cannot be. No code of a dataset is run."""
    _require_library()
    import datasets

    is_local = Path(config.dataset).is_dir()
    options = {} if is_local else {"revision": version}
    try:
        return datasets.load_dataset(
            config.dataset, config.subset, split=config.split, streaming=True, **options
        )
    except Exception as error:  # as above
        raise _unreadable(config.dataset, error) from None


def _rows(shard: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream; what breaks it is a ConfigError."""
    rows = iter(shard)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # as above
            raise _unreadable(name, error) from None
        yield row


def _require_library() -> None:
    if find_spec("datasets") is None:
        raise ConfigError(
            "data.source.kind",
            "the library datasets is not installed",
            "Run: pip install 'datasets>=4,<6'",
        )


def _unreadable(name: str, error: Exception) -> ConfigError:
    what = f"'{name}' cannot be read: {' '.join(str(error).split())[:300].rstrip('.') or type(error).__name__}"
    fix = (
        f"Without a network, download it elsewhere (hf download {name} --repo-type dataset --local-dir FOLDER) and "
        "give dataset=FOLDER, or kind: parquet; a private or gated dataset needs `hf auth login`."
    )
    if Path(name).is_dir():
        fix = "Give a folder of data files that `datasets` opens; for single files take kind: parquet, jsonl or text."
    return ConfigError("data.source.dataset", what, fix)
