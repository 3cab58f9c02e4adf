"""Megatron-Core's distributed checkpoints: `xscale checkpoint export --to megatron` and `import --from megatron`.

This file wraps the library: it builds the GPTModel, saves and loads it, and computes its logits. The mapping of config
and tensors is in `xscale.convert.megatron`.
"""

import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from xscale.checkpoint.files import INDEX
from xscale.checkpoint.index import UNREADABLE, check_index, decode_index
from xscale.checkpoint.load import AverageReader, CheckpointReader, read_config
from xscale.checkpoint.tools.tools import find_checkpoint
from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.compare import TOLERANCE, compare_decoder_logits
from xscale.convert.hf.export_model import check_complete, model_names, to_external
from xscale.convert.hf.registry import model_of
from xscale.convert.hf.tokenizer import tokenizer_of
from xscale.convert.megatron import LIBRARY, GPTModelArguments, gpt_model_arguments, weights
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError, Problem
from xscale.core.files.file_safety import decode_json, is_regular, read_regular, remove_folder
from xscale.core.foreign import reason
from xscale.data.corpus.stored_tokenizer import store_tokenizer
from xscale.mesh.mesh import single_process_group
from xscale.recipe import read
from xscale.run.init_run import create_run, model_from_weights, require_no_run

ARGUMENTS = "gpt_model.json"
"""A file next to the library's: the arguments of TransformerConfig and GPTModel, which the library does not store."""
TABLE = "embedding.word_embeddings.weight"
TRAINING = ("optimizer.", "chained_", "rng_state", "rerun_state")
"""Name prefixes of entries that are not weights."""
ARGS = {"norm_epsilon": "layernorm_epsilon", "swiglu": "gated_linear_unit"}
"""Megatron-LM's argument names, in checkpoints of its trainer, that differ from Megatron-Core's."""
ARCHITECTURE_ARGUMENTS = (
    "num_attention_heads normalization layernorm_epsilon gated_linear_unit position_embedding_type rotary_percent "
    "rotary_base moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor"
)
"""Arguments that change what a GPTModel computes but no tensor's shape."""
FORMAT_FILE = "metadata.json"
"""The library's file that names the format of the others."""
FORMAT_FIX = (
    f"Give a folder that {LIBRARY}'s dist_checkpointing.save wrote "
    f"(it has {FORMAT_FILE}), such as iter_0000100."
)
WEIGHTS_ONLY = (
    "weights only: without optimizer states and training settings (dropout, router losses)"
)


def export_megatron(
    path: Path,
    out: Path,
    *,
    tolerance: float = TOLERANCE,
    ema: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Export the checkpoint at `path` (or a run's newest) to the folder `out`; the exit status.

    `out` is written only if the library, after loading it again, gives the same logits within `tolerance`. ConfigError
    when GPTModel does not support the model, or `out` exists. `ema`: the moving average of the weights, ConfigError
    where there is none.
    """
    path = find_checkpoint(path)
    if out.exists():
        raise ConfigError(
            str(out), "the folder already exists", "Give another folder, or delete it."
        )
    opened, config = (AverageReader if ema else CheckpointReader)(path), read_config(path)
    model = model_of(config["model"])
    if "model.embed.table.weight" not in opened.entries:
        raise ConfigError("model", f"{LIBRARY} does not support {model.kind}", "decoder would map.")
    sizes = ModelSizes(
        opened.entries["model.embed.table.weight"].shape[0], config["data"]["sequence_length"]
    )
    arguments, mapping = gpt_model_arguments(model, sizes), weights(model)
    check_complete(opened, mapping)
    tokenizer = tokenizer_of(path, config["data"])
    part = out.with_name(f".{out.name}.writing")
    remove_folder(part.parent, part.name)
    part.mkdir(parents=True)
    try:
        with single_process_megatron():
            gpt = build(arguments)
            fill(gpt, dict(to_external(opened, mapping)))
            write(gpt, part)
            fill(
                gpt,
                {name: torch.zeros_like(parameter) for name, parameter in gpt.named_parameters()},
            )
            load(gpt, part)
            stored_weights = {
                name.removeprefix("model."): tensor
                for name, tensor in opened.tensors(model_names(opened)).items()
            }
            compared = compare_decoder_logits(
                model, sizes, stored_weights, lambda ids: logits(gpt, ids)
            )
        say(f"{LIBRARY}: {compared.sentence(tolerance)}")
        if not compared.within(tolerance):
            say(f"{out}: not written, because the logits of the two implementations differ")
            return EXIT_FAULT
        settings = {"transformer_config": arguments.config, "gpt_model": arguments.model}
        (part / ARGUMENTS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if isinstance(tokenizer, ConfigError):
            say(f"tokenizer: not exported, because it was not found: {tokenizer.problems[0]}")
        else:
            store_tokenizer(tokenizer, part)
        part.rename(out)
    finally:
        remove_folder(part.parent, part.name)
    say(
        f"{out}: written ({WEIGHTS_ONLY}); {ARGUMENTS} has the arguments of the GPTModel that loads it"
    )
    return EXIT_DONE


def import_megatron(
    source: Path,
    run: Path,
    config: Path | None,
    overrides: list[str],
    *,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = print,
) -> int:
    """Create `run`, a run folder at step 0, from the weights in `source`; the exit status.

    The model is that of `config`. The run is written only if a GPTModel with these weights gives the same logits within
    `tolerance`. ConfigError when the folder's tensors or arguments are those of another model.
    """
    require_no_run(run)
    if config is None:
        raise ConfigError(
            "CONFIG",
            "a Megatron checkpoint does not describe its model",
            "Give a config with its model.",
        )
    settings = read(config, [*overrides, f"run.dir={run}"])[0]
    with single_process_megatron():
        held = contents(source)
        if TABLE not in held:
            raise ConfigError(str(source), f"it has no {TABLE}", "Give a checkpoint of a GPTModel.")
        sizes = ModelSizes(held[TABLE][0], settings.data.sequence_length)
        arguments = gpt_model_arguments(settings.model, sizes)
        gpt = build(arguments)
        _check(
            source,
            held,
            {sharded.key: tuple(sharded.global_shape) for sharded in sharded_tensors(gpt, held)},
        )
        # NaN reveals a tensor that is not loaded.
        fill(
            gpt,
            {
                name: torch.full_like(parameter, torch.nan)
                for name, parameter in gpt.named_parameters()
            },
        )
        say(_agree(source, load(gpt, source, held), arguments))
        imported: dict[str, Tensor] = {}
        state = dict(gpt.named_parameters())
        for mapped in weights(settings.model):
            back = mapped.transform.inverse(
                [state[name].detach() for name in mapped.external_names]
            )
            imported |= {
                name: tensor.contiguous()
                for name, tensor in zip(mapped.xscale_names, back, strict=True)
            }
        compared = compare_decoder_logits(
            settings.model, sizes, imported, lambda ids: logits(gpt, ids)
        )
    say(f"{LIBRARY}: {compared.sentence(tolerance)}")
    if not compared.within(tolerance):
        say(f"{run}: not written, because the logits of the two implementations differ")
        return EXIT_FAULT
    say(
        f"tokenizer: a Megatron checkpoint has none; set data.tokenizer to one of {sizes.vocabulary} ids "
        "(data.tokenizer.kind=huggingface reads a tokenizer.json)"
    )
    path = create_run(settings, model_from_weights(settings, sizes.vocabulary, imported), run)
    say(f"{path}: written ({WEIGHTS_ONLY}); `xscale train {run}/config.yaml` resumes from it")
    return EXIT_DONE


@contextmanager
def single_process_megatron() -> Iterator[None]:
    """Initialise the library's model parallelism for one process on the CPU, and restore the state afterwards."""
    with warnings.catch_warnings():
        # Warnings about missing GPU libraries and about the library's own deprecated names.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.core.transformer.moe import moe_utils

        # The library queries and synchronises the CUDA device for CPU tensors too; and without Transformer Engine the
        # name that its router imports is missing.
        cuda = patch.multiple(torch.cuda, current_device=lambda: "cpu", synchronize=lambda *_: None)
        router = patch.object(moe_utils, "te_general_gemm", None, create=True)
        # The library compiles small functions on their first call, which would take longer than the whole conversion.
        with single_process_group(), cuda, router, torch.compiler.set_stance("force_eager"):
            parallel_state.initialize_model_parallel()
            initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()
                initialize_rng_tracker(force_reset=True)


def build(arguments: GPTModelArguments) -> nn.Module:
    """Build a GPTModel without Transformer Engine: float32, CPU, evaluation mode, weights uninitialised."""
    import torch.nn.functional as F
    from megatron.core.activations import fast_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    functions = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "fast_gelu": fast_gelu}
    settings = arguments.config | {
        "activation_func": functions[arguments.config["activation_func"]]
    }
    cpu_settings = {
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": torch.float32,
    }
    config = TransformerConfig(
        **settings, **cpu_settings, hidden_dropout=0.0, attention_dropout=0.0
    )
    qk_norm = arguments.config["qk_layernorm"]
    layer = get_gpt_layer_local_spec(
        num_experts=arguments.config.get("num_moe_experts"),
        qk_layernorm=qk_norm,
        normalization=arguments.config["normalization"],
    )
    # With apex or Transformer Engine installed, the library would choose norms that need a GPU.
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    if qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = WrappedTorchNorm
    block = TransformerBlockSubmodules([layer] * config.num_layers, WrappedTorchNorm)
    model: nn.Module = GPTModel(config, block, **arguments.model)
    return model.eval()


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set every parameter."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys(), parameters.keys() ^ tensors.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            assert parameters[name].shape == tensor.shape, name
            parameters[name].copy_(tensor)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Compute the logits [B, T, V] of ids [B, T]."""
    tokens = ids.shape[1]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
    out: Tensor = model(ids, torch.arange(tokens).expand_as(ids), hidden)
    return out


def write(model: nn.Module, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_sharded(model), str(folder))


def load(
    model: nn.Module, folder: Path, held: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Any]:
    """Load the model from `folder`; returns the entries that are not tensors."""
    from megatron.core import dist_checkpointing

    sharded_state = {
        name: sharded
        for name, sharded in _sharded(model, held).items()
        if not name.endswith("_extra_state")
    }
    require_torch_format(folder)
    loaded: dict[str, Any] = _guarded(
        folder, lambda: dist_checkpointing.load(sharded_state, str(folder))
    )
    fill(model, {name: loaded.pop(name) for name, _ in model.named_parameters()})
    return loaded


def contents(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in `folder` by name; blocks may be stacked. ConfigError if unreadable."""
    from megatron.core import dist_checkpointing

    require_torch_format(folder)
    metadata = _guarded(folder, lambda: dist_checkpointing.load_tensors_metadata(str(folder)))
    return {name: tuple(tensor.global_shape) for name, tensor in metadata.items()}


def sharded_tensors(model: nn.Module, held: dict[str, tuple[int, ...]]) -> list[Any]:
    """Return the sharded tensors that the library would load from a folder with these tensors."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors

    state = _sharded(model, held)
    apply_factories(state)
    tensors: list[Any] = []

    def gather(node: Any) -> None:
        if isinstance(node, ShardedTensor):
            tensors.append(node)
        elif isinstance(node, dict | list):
            for inner in node.values() if isinstance(node, dict) else node:
                gather(inner)

    gather(extract_sharded_tensors(state)[0])
    return tensors


def _sharded(model: Any, held: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Return the model's sharded state dict, with one name per block if the names in `held` have block numbers."""
    apart = any(name.startswith("decoder.layers.0.") for name in held or {})
    state: dict[str, Any] = model.sharded_state_dict(metadata={"non_homogeneous_layers": apart})
    return state


def require_torch_format(folder: Path) -> None:
    """Raise ConfigError unless `folder` is in torch's format, the only one whose files cannot run code here."""
    path, fix = folder / FORMAT_FILE, "Convert it with Megatron-Core to the format torch_dist."
    try:
        stored = decode_json(read_regular(path))
        formats = (stored["sharded_backend"], stored.get("common_backend", "torch"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the folder cannot be read: {reason(error)}"
        raise ConfigError(str(path), what, FORMAT_FIX) from None
    if formats != ("torch_dist", "torch"):
        raise ConfigError(str(path), f"its format is {formats[0]}, {formats[1]}", fix)
    # The library would wait for a FIFO or read a device without end.
    if special := [file for file in folder.iterdir() if not file.is_dir() and not is_regular(file)]:
        raise ConfigError(
            str(special[0]), "this is not a regular file", "Copy the folder's files again."
        )


@contextmanager
def nothing_executed(folder: Path) -> Iterator[None]:
    """Let the library read an index and objects only through restricted unpicklers; a name in them runs nothing.

    The library and torch read `.metadata` by pickle.load, and objects by torch.load(weights_only=False).
    """

    def read_metadata(reader: Any, *_: Any, **__: Any) -> Any:
        index = decode_index(read_regular(folder / INDEX))
        check_index(
            index,
            {file.name: file.stat().st_size for file in folder.iterdir() if is_regular(file)},
            complete=False,
        )
        return index

    original = torch.load

    def load_weights(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "weights_only": True})

    with (
        patch.object(FileSystemReader, "read_metadata", read_metadata),
        patch.object(torch, "load", load_weights),
    ):
        yield


def _guarded(folder: Path, action: Callable[[], Any]) -> Any:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with nothing_executed(folder):
            return action()
    except (CheckpointingException, OSError, *UNREADABLE) as error:
        raise ConfigError(
            str(folder), f"the folder cannot be read: {reason(error)}", FORMAT_FIX
        ) from None


def _check(
    source: Path, held: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    fix = "Give a config with the model that it was trained with."
    if lacking := sorted(wanted.keys() - held.keys()):
        raise ConfigError(str(source), f"it lacks {lacking[0]} ({len(lacking)} in all)", fix)
    unknown = sorted(name for name in held.keys() - wanted.keys() if not name.startswith(TRAINING))
    if unknown:
        raise ConfigError(
            str(source), f"it has {unknown[0]}, which the model lacks ({len(unknown)} in all)", fix
        )
    for name, shape in wanted.items():
        if held[name] != shape:
            raise ConfigError(
                str(source), f"{name} has shape {[*held[name]]}, the model has {[*shape]}", fix
            )


def _agree(source: Path, entries: dict[str, Any], arguments: GPTModelArguments) -> str:
    """Compare the folder's arguments, if it has them, with those of the config; returns a message for the user."""
    expected = arguments.config | arguments.model
    saved: dict[str, Any] = {}
    if (source / ARGUMENTS).is_file():
        try:
            stored = decode_json(read_regular(source / ARGUMENTS))
            saved = {**stored["transformer_config"], **stored["gpt_model"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"the file is not the arguments of a GPTModel ({reason(error)})"
            raise ConfigError(
                str(source / ARGUMENTS), what, "Copy it again, or remove it."
            ) from None
        # It is the size of a table, whose shape is compared, or has no effect.
        saved.pop("max_sequence_length", None)
    elif "args" in entries:
        stored = vars(entries["args"]) if isinstance(entries["args"], Namespace) else {}
        saved = {ARGS.get(name, name): value for name, value in stored.items()}
        saved = {name: saved[name] for name in ARCHITECTURE_ARGUMENTS.split() if name in saved}
    wrong = [
        name for name in sorted(expected.keys() & saved.keys()) if expected[name] != saved[name]
    ]
    if wrong:
        fix = "Change the config's model, or give another config."
        raise ConfigError(
            [
                Problem(
                    str(source), f"its {name} is {saved[name]}, the config's {expected[name]}", fix
                )
                for name in wrong
            ]
        )
    known = sorted(expected.keys() & saved.keys())
    if not known:
        unchecked = "epsilons, the base of rotary positions, activations"
        return f"the folder has no model arguments: those without a tensor ({unchecked}) are taken from the config"
    return f"the folder's arguments equal the config's: {', '.join(known)}"
