"""Import a folder written by `save_pretrained` of transformers as an xscale model, verified by comparing logits."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.checkpoint.torch_file import load_torch_file
from xscale.convert.hf.architecture import Architecture, ModelSizes
from xscale.convert.hf.class_head import body_weights, present_class_head
from xscale.convert.hf.compare import LogitComparison, compare_logits
from xscale.convert.hf.config_json import UNKNOWN, Headers, read_config_json
from xscale.convert.hf.mxfp4 import dequantized
from xscale.convert.hf.registry import model_from_hf_config, model_of
from xscale.convert.mapping import WeightMapping
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import (
    check_name,
    check_readable,
    check_relative,
    decode_json,
    read_regular,
)
from xscale.core.foreign import foreign_errors, reason
from xscale.nn.model.model import MODELS

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH_INDEX, TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
"""Files of the older format, by `torch.save`; read where there are no safetensors."""
LEGACY_ENDINGS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of names in the first BERT files -> those of today."""


class TorchFile:
    """The tensors of a file by `torch.save`, read without running code that it contains."""

    def __init__(self, file: Path) -> None:
        # Mapped into memory where it is an archive, so that a tensor is read when it is used.
        stored = load_torch_file(file, mmap=True)
        if not isinstance(stored, dict) or not all(
            isinstance(tensor, Tensor) for tensor in stored.values()
        ):
            raise ValueError("it is not a dictionary of tensors")
        if not all(isinstance(name, str) for name in stored):
            raise ValueError("a tensor has no name")
        self.tensors: dict[str, Tensor] = stored

    def keys(self) -> Iterable[str]:
        return self.tensors

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> "StoredShape":
        return StoredShape(self.tensors[name].shape)


@dataclass(frozen=True)
class StoredShape:
    """The shape of a tensor, as safetensors gives it."""

    shape: Sequence[int]

    def get_shape(self) -> Sequence[int]:
        return self.shape


class HfFolder:
    """The tensors of a folder, read one at a time by name."""

    def __init__(self, folder: Path, files: dict[str, Any], opened: Sequence[Any]) -> None:
        self.folder = folder
        self.opened = opened
        """The open files."""
        self.stored_names = {_current_name(name): name for name in files}
        self.files = {_current_name(name): file for name, file in files.items()}
        """Tensor name -> the open file that contains it."""

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(self.stored_names[name])
        return tensor

    def shapes(self) -> dict[str, Sequence[int]]:
        """Return the shape of each tensor, by its name in the files, from their headers."""
        return {
            name: file.get_slice(name).get_shape()
            for file in self.opened
            for name in file.keys()  # noqa: SIM118
        }

    def find(self, name: str) -> Tensor | None:
        """Read a tensor; None if the files do not have it."""
        return self.tensor(name) if name in self.files else None


@contextmanager
def open_hf_folder(folder: Path) -> Iterator[HfFolder]:
    """Open the files with the tensors of a folder; ConfigError when one is missing or cannot be read.

    They are safetensors, or else files by `torch.save`.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in _weight_files(folder):
            if not (folder / name).is_file():
                fix = f"Save it with `save_pretrained`, which writes safetensors; {TORCH_SINGLE} is read too."
                raise ConfigError(str(folder), f"file {name} is missing", fix)
            opened: Any
            fix = "Copy it again, or save it as safetensors with `save_pretrained`."
            with foreign_errors(folder / name, "the file cannot be read", fix):
                check_readable(folder / name)
                if name.endswith(".safetensors"):
                    opened = stack.enter_context(safe_open(folder / name, framework="pt"))
                else:
                    opened = TorchFile(folder / name)
            files |= dict.fromkeys(opened.keys(), opened)
        yield HfFolder(folder, dequantized(files), [*dict.fromkeys(files.values())])


SHARDS = 10_000
"""Most files of tensors of one model; each is opened."""


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the tensors; ConfigError when an index cannot be read."""
    for index, single in ((INDEX, SINGLE), (TORCH_INDEX, TORCH_SINGLE)):
        if (folder / index).exists():
            try:
                stored = decode_json(read_regular(folder / index))["weight_map"]
                names = set(stored.values())
                if len(names) > SHARDS:
                    raise ValueError(f"it names {len(names)} files")
                return sorted(map(check_relative, names))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                what = f"the file is not an index of tensors ({reason(error)})"
                raise ConfigError(str(folder / index), what, "Copy it again.") from None
        if (folder / single).exists():
            return [single]
    return [SINGLE]


def _current_name(name: str) -> str:
    for ending, current in LEGACY_ENDINGS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + current
    return name


def resolve_snapshot(folder: Path) -> Path:
    """Return the model's folder in `folder`: itself, or the snapshot in a folder of the Hugging Face cache.

    Such a folder, `models--OWNER--NAME`, has `snapshots/COMMIT` and `refs/main` with the newest commit's name.
    """
    snapshots = folder / "snapshots"
    if (folder / "config.json").exists() or not snapshots.is_dir():
        return folder
    known = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
    try:
        main = check_name(read_regular(folder / "refs" / "main").decode().strip())
    except (OSError, ValueError):
        main = known[0] if len(known) == 1 else ""
    if main not in known:
        what = f"it has {len(known)} snapshots, and refs/main names none of them"
        raise ConfigError(
            str(folder),
            what,
            f"Give one of: {', '.join(str(snapshots / name) for name in known[:4])}.",
        )
    return snapshots / main


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json with the library's defaults filled in. ConfigError when it cannot be read, or does not fit the
    headers of the folder's tensors.
    """
    try:
        with open_hf_folder(folder) as source:
            headers = Headers.of(source.shapes())
    except ConfigError:
        headers = UNKNOWN
    return read_config_json(folder, headers)


MISFIT = "its tensors do not fit its config.json"
NAMES_LISTED = 4
"""Tensor names that a message lists; it counts the others."""


@dataclass(frozen=True)
class ImportedModel:
    """A model converted from transformers."""

    architecture: Architecture
    config: dict[str, Any]
    """config.json, with the library's defaults filled in."""
    model: dict[str, Any]
    """The `model` section of a config."""
    sizes: ModelSizes
    weights: dict[str, Tensor]
    """Parameter name in xscale -> float32 tensor."""
    ignored_tensors: tuple[str, ...]
    """Tensors of the file that the mapping ignores."""
    comparison: LogitComparison


def import_model(folder: Path, *, sentence_head: bool = False) -> ImportedModel:
    """Convert the model in `folder`. ConfigError with the keys that do not map, and missing or unknown tensors.

    `sentence_head`: whether its classifier of pairs of sentences is kept too, where it has one.
    """
    folder = resolve_snapshot(folder)
    config = read_config(folder)
    architecture, section, sizes = model_from_hf_config(config)
    with open_hf_folder(folder) as source, foreign_errors(folder, MISFIT):
        section = architecture.with_tensors(section, source.find)
        if sentence_head and architecture.sentence_head is not None:
            classes = source.find(f"{architecture.sentence_head.classifier}.weight")
            section |= {} if classes is None else {"sentence_head": {"classes": len(classes)}}
        model = model_of(section)
        weights, ignored = _weights(
            source, architecture, architecture.weights(model, sizes), architecture.loader_of(model)
        )
    with torch.device("meta"), foreign_errors(folder, MISFIT):
        built: nn.Module = MODELS.build(model, sizes.vocabulary, sizes.length)
    _check_shapes(
        folder, weights, {name: mapped.shape for name, mapped in built.named_parameters()}
    )
    compared = compare_logits(model, sizes, weights, architecture, folder)
    return ImportedModel(architecture, config, section, sizes, weights, ignored, compared)


def import_body(folder: Path, *, dense: str | None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Convert the model in `folder` without its language-model head, for one with a head of classes; also returns the
    tensors of other heads, which are not used.

    The folder's class may have any head, or none. The classes are those of its classifier, if it has one of the same
    form: `dense` is the activation of the head's dense layer, such as BERT's pooler; None: it has none. ConfigError as
    in `import_model`.
    """
    folder = resolve_snapshot(folder)
    architecture, section, sizes = model_from_hf_config(read_config(folder))
    with open_hf_folder(folder) as source, foreign_errors(folder, MISFIT):
        model = model_of(architecture.with_tensors(section, source.find))
        mapping = body_weights(architecture.weights(model, sizes))
        first_components = {
            f"{name.partition('.')[0]}." for mapped in mapping for name in mapped.external_names
        }
        prefix = first_components.pop() if len(first_components) == 1 else ""
        has_prefix = any(name.startswith(prefix) for name in source.files)
        bare = "" if has_prefix else prefix
        mapping += present_class_head(
            architecture.name, dense, {f"{bare}{name}" for name in source.files}
        )
        of_heads = [r"(.*\.)?pooler\..*", *[rf"(?!{re.escape(prefix)}).*"] * has_prefix]
        without_heads = replace(
            architecture, prefix=prefix, ignored=(*architecture.ignored, *of_heads)
        )
        return _weights(source, without_heads, mapping, architecture.loader)


def _weights(
    source: HfFolder, architecture: Architecture, mapping: list[WeightMapping], loader: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    bare = (
        architecture.prefix
        if not any(name.startswith(architecture.prefix) for name in source.files)
        else ""
    )
    required = {
        name: name.removeprefix(bare) for mapped in mapping for name in mapped.external_names
    }
    fallbacks = dict(architecture.fallbacks)
    required |= {
        name: fallbacks[name]
        for name in required
        if name in fallbacks and required[name] not in source.files
    }
    if missing := [name for name in required.values() if name not in source.files]:
        raise _incomplete(source, missing, loader)
    # A tied head may be stored twice.
    unused = set(source.files) - set(required.values())
    ignored = sorted(
        name
        for name in unused
        if any(
            re.fullmatch(pattern, name) for pattern in (*architecture.ignored, r".*lm_head\.weight")
        )
    )
    if unknown := sorted(unused - set(ignored)):
        fix = "The mapping supports no part of the model with these tensors."
        raise ConfigError(str(source.folder), f"it has unknown tensors: {_listed(unknown)}", fix)
    weights: dict[str, Tensor] = {}
    for mapped in mapping:
        external_tensors = [source.tensor(required[name]).float() for name in mapped.external_names]
        if not mapped.xscale_names and any(tensor.any() for tensor in external_tensors):
            what = f"its {_listed(list(mapped.external_names))} is not zero and has no counterpart in xscale"
            raise ConfigError(str(source.folder), what, "A model without it would map.")
        tensors = mapped.transform.inverse(external_tensors)
        assert len(tensors) == len(mapped.xscale_names), mapped
        weights |= {
            name: tensor.contiguous()
            for name, tensor in zip(mapped.xscale_names, tensors, strict=True)
        }
    return weights, tuple(ignored)


def _incomplete(source: HfFolder, missing: list[str], loader: str) -> ConfigError:
    """Return the error for a folder without some tensors; those of a model without its head have no prefix."""
    what, fix = (
        f"it has no tensor {_listed(missing)}",
        f"Save a complete {loader} with `save_pretrained`.",
    )
    prefixed = [name for name in missing if name.partition(".")[2] in source.files]
    if prefixed:
        prefix = prefixed[0].partition(".")[0]
        of_head = [name for name in missing if name not in prefixed]
        what = f"it is a model without its language-model head: its tensors lack the prefix '{prefix}.'"
        what += f", and it has no {_listed(of_head)}" if of_head else ""
        fix = (
            fix.removesuffix(".")
            + f"; or fine-tune it on labels, by a run with init.from={source.folder}."
        )
    return ConfigError(str(source.folder), what, fix)


def _check_shapes(
    folder: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> None:
    assert weights.keys() == shapes.keys(), weights.keys() ^ shapes.keys()
    wrong = [
        f"{name} {[*weights[name].shape]} for {[*shape]}"
        for name, shape in shapes.items()
        if weights[name].shape != shape
    ]
    if wrong:
        raise ConfigError(
            str(folder), f"tensor shapes do not match its config.json: {_listed(wrong)}"
        )


def _listed(names: list[str]) -> str:
    omitted = len(names) - NAMES_LISTED
    return ", ".join(names[:NAMES_LISTED]) + (f" and {omitted} more" if omitted > 0 else "")
