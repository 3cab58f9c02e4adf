"""`xscale checkpoint`: inspect, verify, compare, prune, convert, upcycle and merge checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from xscale.cli.terminal.complete import complete_recipe, complete_run, one_of
from xscale.cli.terminal.group import Group
from xscale.cli.terminal.options import (
    CheckpointFolder,
    CommandWithSettings,
    Ema,
    Json,
    Overrides,
    Plugins,
    Step,
    Strict,
    TensorPrefix,
    checkpoint_to_read,
    checkpoints_in,
    rank_0_alone,
    readable,
)
from xscale.core.paths import path

checkpoint_app = typer.Typer(
    cls=Group,
    help="Inspect, verify, compare, prune, export and import checkpoints.",
    no_args_is_help=True,
)
checkpoint_app.callback()(rank_0_alone)
Tolerance = Annotated[
    float,
    typer.Option(
        "--bar", "--tolerance", help="Largest logit difference accepted between the two models."
    ),
]
FORMATS = "hf (transformers), deepspeed-universal or megatron."
complete_format = one_of("hf", "deepspeed-universal", "megatron")


@checkpoint_app.command("ls")
def checkpoint_ls(run: CheckpointFolder, json: Json = False) -> None:
    """List the checkpoints of a run; bad ones with the reason."""
    from xscale.commands.checkpoints.checkpoint import ls

    raise typer.Exit(ls(checkpoints_in(run), as_json=json))


@checkpoint_app.command("show")
def checkpoint_show(
    path: CheckpointFolder,
    only: TensorPrefix = "",
    json: Json = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Show step, trainer state and tensors of a checkpoint, or of the newest checkpoint of a run."""
    from xscale.commands.checkpoints.checkpoint import show

    path = checkpoint_to_read(checkpoints_in(path), step, strict)
    raise typer.Exit(show(path, only=only, as_json=json))


@checkpoint_app.command("verify")
def checkpoint_verify(path: CheckpointFolder, json: Json = False) -> None:
    """Read every byte and compare its hash with the manifest; exit status 1 when a checkpoint is bad."""
    from xscale.commands.checkpoints.checkpoint import verify

    raise typer.Exit(verify(checkpoints_in(path), as_json=json))


@checkpoint_app.command("diff")
def checkpoint_diff(
    first: CheckpointFolder, second: CheckpointFolder, only: TensorPrefix = "", json: Json = False
) -> None:
    """Compare config, state and tensors of two checkpoints; exit status 1 when they differ."""
    from xscale.commands.checkpoints.checkpoint import diff

    raise typer.Exit(diff(checkpoints_in(first), checkpoints_in(second), only=only, as_json=json))


@checkpoint_app.command("prune")
def checkpoint_prune(
    run: CheckpointFolder,
    keep_last: Annotated[
        int | None, typer.Option(help="Number of newest checkpoints to keep.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Also keep checkpoints at multiples of this step.")
    ] = None,
    bad: Annotated[
        bool, typer.Option("--bad", help="Delete checkpoints that were set aside as bad.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted.")] = False,
) -> None:
    """Delete old or bad checkpoints; the last good checkpoint is always kept."""
    from xscale.commands.checkpoints.checkpoint import prune

    raise typer.Exit(
        prune(checkpoints_in(run), keep_last=keep_last, keep_every=keep_every, bad=bad, dry=dry)
    )


@checkpoint_app.command("consolidate")
def checkpoint_consolidate(
    path: CheckpointFolder,
    out: Annotated[Path, typer.Argument(help="A .safetensors file.", parser=path)],
    only: TensorPrefix = "model.",
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Merge the sharded weights of a checkpoint, or its other tensors, into one safetensors file without the prefix."""
    from xscale.commands.checkpoints.checkpoint import consolidate

    raise typer.Exit(
        consolidate(checkpoint_to_read(checkpoints_in(path), step, strict), out, only=only)
    )


@checkpoint_app.command("export")
def checkpoint_export(
    path: CheckpointFolder,
    out: Annotated[
        Path, typer.Argument(help="The folder to write; it must not exist.", parser=path)
    ],
    to: Annotated[
        str, typer.Option("--to", help=f"Format: {FORMATS}", autocompletion=complete_format)
    ] = "hf",
    architecture: Annotated[
        str | None, typer.Option(help="Such as mistral; default: the first that fits.")
    ] = None,
    bar: Tolerance = 1e-5,
    ema: Ema = False,
    plugins: Plugins = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Export a checkpoint to the format of another library.

    The exported model must give the same logits; otherwise nothing is written and the exit status is 1.
    """
    from xscale.commands.checkpoints.convert import export_checkpoint

    path = checkpoint_to_read(checkpoints_in(path), step, strict)
    raise typer.Exit(export_checkpoint(path, out, to, architecture, bar, plugins=plugins, ema=ema))


@checkpoint_app.command("import", cls=CommandWithSettings)
def checkpoint_import(
    source: Annotated[
        Path, typer.Argument(help="A folder that the other library wrote.", parser=path)
    ],
    run: Annotated[Path, typer.Argument(help="The run folder to create.", parser=path)],
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A config, or the name of a recipe, for everything but the model.",
            callback=readable,
            autocompletion=complete_recipe,
            parser=path,
        ),
    ] = None,
    overrides: Overrides = None,
    origin: Annotated[
        str, typer.Option("--from", help=f"Format: {FORMATS}", autocompletion=complete_format)
    ] = "hf",
    bar: Tolerance = 1e-5,
) -> None:
    """Create a run from a checkpoint of another library.

    The imported model must give the same logits; otherwise nothing is written and the exit status is 1.
    """
    from xscale.commands.checkpoints.convert import import_checkpoint

    raise typer.Exit(import_checkpoint(source, run, config, overrides or [], origin, bar))


@checkpoint_app.command("upcycle", cls=CommandWithSettings)
def checkpoint_upcycle(
    dense: Annotated[
        Path,
        typer.Argument(
            help="The run folder of a dense model.", autocompletion=complete_run, parser=path
        ),
    ],
    run: Annotated[Path, typer.Argument(help="The run folder to create.", parser=path)],
    overrides: Overrides = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Validation sequences for the loss before and after.")
    ] = 64,
    plugins: Plugins = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Upcycle a dense run to a mixture-of-experts run; the overrides say which ffns become mixtures."""
    from xscale.commands.checkpoints.upcycle import upcycle_run

    raise typer.Exit(
        upcycle_run(
            checkpoint_to_read(dense, step, strict),
            run,
            overrides or [],
            sequences,
            plugins=plugins,
        )
    )


@checkpoint_app.command("merge-lora")
def checkpoint_merge_lora(
    source: Annotated[
        Path,
        typer.Argument(
            help="The run folder of a run with LoRA.", autocompletion=complete_run, parser=path
        ),
    ],
    run: Annotated[Path, typer.Argument(help="The run folder to create.", parser=path)],
    plugins: Plugins = False,
    step: Step = None,
    strict: Strict = False,
) -> None:
    """Merge the LoRA of a run's newest checkpoint into its linear maps, as a new run at step 0."""
    from xscale.commands.checkpoints.merge_lora import merge_run

    raise typer.Exit(merge_run(checkpoint_to_read(source, step, strict), run, plugins=plugins))
