"""Megatron-Core's GPTModel: build and run it on the CPU, save it, and load it so that its files can run no code."""

import warnings
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
from xscale.convert.megatron import LIBRARY, GPTModelArguments
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import decode_json, is_regular, read_regular
from xscale.core.foreign import reason
from xscale.mesh.mesh import single_process_group

FORMAT_FILE = "metadata.json"
"""The library's file that names the format of the others."""
FORMAT_FIX = (
    f"Give a folder that {LIBRARY}'s dist_checkpointing.save wrote "
    f"(it has {FORMAT_FILE}), such as iter_0000100."
)


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


def fill_with(model: nn.Module, value: float) -> None:
    """Set every parameter to a value that shows what is not loaded afterwards."""
    fill(model, {name: torch.full_like(x, value) for name, x in model.named_parameters()})


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
