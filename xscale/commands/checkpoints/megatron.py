"""Megatron-Core's distributed checkpoints: `xscale checkpoint export --to megatron` and `import --from megatron`.

This file wraps the library: it builds the GPTModel, saves and loads it, and computes its logits. The mapping of config
and tensors is in `xscale.convert.megatron`.
"""

import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from xscale.checkpoint.load import AverageReader, CheckpointReader, read_config
from xscale.checkpoint.tools.tools import find_checkpoint
from xscale.commands.checkpoints.gpt_model import (
    build,
    contents,
    fill,
    fill_with,
    load,
    logits,
    sharded_tensors,
    single_process_megatron,
    write,
)
from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.hf.compare import TOLERANCE, compare_decoder_logits
from xscale.convert.hf.export_model import check_complete, model_names, to_external
from xscale.convert.hf.registry import model_of
from xscale.convert.hf.tokenizer import tokenizer_of
from xscale.convert.megatron import LIBRARY, GPTModelArguments, gpt_model_arguments, weights
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError, Problem
from xscale.core.files.atomic_write import writing_folder
from xscale.core.files.file_safety import decode_json, read_regular
from xscale.core.foreign import reason
from xscale.data.corpus.stored_tokenizer import store_tokenizer
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
        fix = "Give another folder, or delete it."
        raise ConfigError(str(out), "the folder already exists", fix)
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
    with writing_folder(out) as part:
        with single_process_megatron():
            gpt = build(arguments)
            fill(gpt, dict(to_external(opened, mapping)))
            write(gpt, part)
            fill_with(gpt, 0.0)
            load(gpt, part)
            compared = compare_decoder_logits(
                model, sizes, _stored_weights(opened), lambda ids: logits(gpt, ids)
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
    say(
        f"{out}: written ({WEIGHTS_ONLY}); {ARGUMENTS} has the arguments of the GPTModel that loads it"
    )
    return EXIT_DONE


def _stored_weights(opened: CheckpointReader) -> dict[str, Tensor]:
    stored = opened.tensors(model_names(opened))
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


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
        fill_with(gpt, math.nan)
        say(_agree(source, load(gpt, source, held), arguments))
        imported = _imported(gpt, settings.model)
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


def _imported(gpt: nn.Module, model: Any) -> dict[str, Tensor]:
    """The tensors of xscale's model, of those of a GPTModel."""
    state, imported = dict(gpt.named_parameters()), dict[str, Tensor]()
    for mapped in weights(model):
        back = mapped.transform.inverse([state[name].detach() for name in mapped.external_names])
        for name, tensor in zip(mapped.xscale_names, back, strict=True):
            imported[name] = tensor.contiguous()
    return imported


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
