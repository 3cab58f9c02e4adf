"""Export a checkpoint to a folder that transformers loads, verified by comparing logits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.checkpoint.load import (
    AverageReader,
    CheckpointReader,
    read_config,
    read_state,
    unpadded_vocabulary_of,
)
from xscale.checkpoint.tools.tools import find_checkpoint
from xscale.convert.hf.architecture import Architecture, ModelSizes
from xscale.convert.hf.class_head import class_head_of, select_classifier
from xscale.convert.hf.compare import TOLERANCE, compare_logits
from xscale.convert.hf.import_model import INDEX, SINGLE
from xscale.convert.hf.registry import model_of, select_architecture
from xscale.convert.hf.special_ids import export_generation_config, kept_special_ids, special_ids
from xscale.convert.hf.tokenizer import export_tokenizer, tokenizer_of
from xscale.convert.mapping import WeightMapping
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError
from xscale.core.files.atomic_write import writing_folder
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.nn.head.head import vocabulary_parameters
from xscale.nn.model.model import MODELS, Model

SHARD = 5 << 30
"""Maximum bytes of a safetensors file, unless one tensor alone is larger."""


class WithoutPadding:
    """Reads a checkpoint without the padding rows of its vocabulary, which have no probability.

    transformers would give them one.
    """

    def __init__(
        self, opened: CheckpointReader, model: Model.Config, rows: int, length: int
    ) -> None:
        """`rows`: those of the vocabulary in the checkpoint."""
        self.opened, self.entries = opened, opened.entries
        self.rows = unpadded_vocabulary_of(read_state(opened.path), rows)
        """Rows of the vocabulary that are read."""
        with torch.device("meta"):
            built: nn.Module = MODELS.build(model, rows, length)
        self.cut = frozenset() if self.rows == rows else vocabulary_parameters(built)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Read full tensors to the CPU, as `CheckpointReader.tensors`."""
        tensors = self.opened.tensors(names)
        return {
            name: tensor[: self.rows] if name.removeprefix("model.") in self.cut else tensor
            for name, tensor in tensors.items()
        }


Reader = CheckpointReader | WithoutPadding


def export_model(
    path: Path,
    out: Path,
    *,
    architecture: str | None = None,
    tolerance: float = TOLERANCE,
    ema: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Export the checkpoint at `path` (or a run's newest) to the folder `out`; the exit status.

    `out` is written only if the logits of both implementations differ by at most `tolerance`. `ema`: export the moving
    average of the weights. ConfigError when the architecture does not support the model, `out` exists, or there is no
    average.
    """
    path = find_checkpoint(path)
    if out.exists():
        raise ConfigError(
            str(out), "the folder already exists", "Give another folder, or delete it."
        )
    opened = (AverageReader if ema else CheckpointReader)(path)
    config = read_config(path)
    model = model_of(config["model"])
    table = opened.entries[
        f"model.{'source' if model.kind == 'encoder_decoder' else 'embed'}.table.weight"
    ]
    tokenizer: Tokenizer | ConfigError = ConfigError(
        str(path), "the model was imported without one"
    )
    kept = kept_special_ids(path)
    if kept is None or kept.had_tokenizer:
        tokenizer = tokenizer_of(path, config["data"])
    special = special_ids(tokenizer, config["data"]) if kept is None else kept.ids
    pad, eos = special.get("pad_token_id") or 0, special.get("eos_token_id")
    reader = WithoutPadding(opened, model, table.shape[0], config["data"]["sequence_length"])
    sizes = ModelSizes(
        reader.rows, config["data"]["sequence_length"], pad, eos if isinstance(eos, int) else 2
    )
    head = class_head_of(
        {name.removeprefix("model."): entry.shape for name, entry in opened.entries.items()}, config
    )
    if head is None:
        chosen, data = select_architecture(model, sizes, architecture)
    else:
        chosen, data = select_classifier(head, model, sizes, architecture)
    data = special | data if kept is None else data | special
    with writing_folder(out) as part:
        for message in export_generation_config(path, part, same_tokenizer=kept is not None):
            say(message)
        return _write(reader, chosen, model, sizes, data, tokenizer, part, out, tolerance, say)


def _write(
    opened: Reader,
    architecture: Architecture,
    model: Model.Config,
    sizes: ModelSizes,
    data: dict[str, Any],
    tokenizer: Tokenizer | ConfigError,
    part: Path,
    out: Path,
    tolerance: float,
    say: Callable[[str], None],
) -> int:
    mapping = architecture.weights(model, sizes)
    check_complete(opened, mapping)
    write_weights(to_external(opened, mapping), part)
    (part / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if isinstance(tokenizer, ConfigError):
        messages = [f"tokenizer: not exported, because it was not found: {tokenizer.problems[0]}"]
    else:
        messages = export_tokenizer(tokenizer, part)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in opened.tensors(model_names(opened)).items()
    }
    compared = compare_logits(model, sizes, weights, architecture, part)
    for note in (*messages, *architecture.notes, *lost_losses(architecture, model)):
        say(note)
    say(f"{architecture.name}: {compared.sentence(tolerance)}")
    for fault in compared.loading_errors:
        say(f"transformers: {fault}")
    if not compared.within(tolerance):
        say(f"{out}: not written, because the logits of the two implementations differ")
        return EXIT_FAULT
    part.rename(out)
    say(
        f"{out}: written; load it with transformers.{architecture.loader_of(model)}.from_pretrained"
    )
    return EXIT_DONE


def lost_losses(architecture: Architecture, model: Model.Config) -> list[str]:
    """List notes on losses of the routers that config.json has no key for."""
    stacks = [
        getattr(model, name) for name in ("stack", "encoder", "decoder") if hasattr(model, name)
    ]
    ffns = [stack.block_config(layer).ffn for stack in stacks for layer in range(stack.depth)]
    weights = sorted(
        {getattr(ffn.router, "z_loss_weight", 0.0) for ffn in ffns if ffn.kind == "moe"} - {0.0}
    )
    if architecture.keeps_z_loss or not weights:
        return []
    values = " and ".join(f"{weight:g}" for weight in weights)
    return [
        f"router z-loss: the weight of {values} is not exported, because {architecture.name} has no such loss"
    ]


def model_names(opened: Reader) -> list[str]:
    return [name for name in opened.entries if name.startswith("model.")]


def check_complete(opened: Reader, mapping: list[WeightMapping]) -> None:
    """Assert that the mapping contains every tensor of the model."""
    covered = {f"model.{name}" for mapped in mapping for name in mapped.xscale_names}
    assert covered == set(model_names(opened)), covered ^ set(model_names(opened))


def to_external(opened: Reader, mapping: list[WeightMapping]) -> Iterator[tuple[str, Tensor]]:
    """Yield (external name, tensor), one mapping after the other."""
    for mapped in mapping:
        tensors = opened.tensors([f"model.{name}" for name in mapped.xscale_names])
        external_tensors = mapped.transform.forward(
            [tensors[f"model.{name}"] for name in mapped.xscale_names]
        )
        assert len(external_tensors) == len(mapped.external_names), mapped
        yield from zip(mapped.external_names, external_tensors, strict=True)


def write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path, limit: int = SHARD) -> None:
    """Write one safetensors file, or several shards of at most `limit` bytes with an index."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            flush()
            size = 0
        held[name] = tensor.detach().to(memory_format=torch.contiguous_format).contiguous().clone()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
