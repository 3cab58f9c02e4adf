"""`xscale checkpoint export | import`: choose the conversion by the name of the format."""

from importlib.util import find_spec
from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.core.say import say

HF, UNIVERSAL, MEGATRON = "hf", "deepspeed-universal", "megatron"


def check_format(option: str, name: str) -> None:
    """Raise ConfigError if the format is unknown, or if the library that it needs is not installed."""
    if name not in (HF, UNIVERSAL, MEGATRON):
        raise ConfigError(
            option, f"unknown format '{name}'", f"Choose {HF}, {UNIVERSAL} or {MEGATRON}."
        )
    if name == HF and find_spec("transformers") is None:
        raise ConfigError(
            option, "the transformers library is not installed", "pip install 'transformers>=5.0'"
        )
    if name == MEGATRON and (find_spec("megatron") is None or find_spec("megatron.core") is None):
        raise ConfigError(
            option, "megatron-core is not installed", "pip install 'megatron-core>=0.16,<0.17'"
        )


def export_checkpoint(
    path: Path,
    out: Path,
    to: str,
    architecture: str | None,
    tolerance: float,
    *,
    plugins: bool = False,
    ema: bool = False,
) -> int:
    """Export the checkpoint at `path` to the folder `out` in the format `to`; the exit status.

    `plugins`: import the modules that the run's config names. `ema`: export the moving average of the weights.
    """
    check_format("--to", to)
    if architecture and to != HF:
        raise ConfigError(
            "--architecture", f"'{to}' has only one architecture", f"Omit it, or use --to {HF}."
        )
    if ema and to == UNIVERSAL:
        what = f"'{to}' has the states of the optimizer, which are those of the weights"
        raise ConfigError("--ema", what, f"Omit it, or use --to {HF} or --to {MEGATRON}.")
    from xscale.checkpoint import manifest
    from xscale.checkpoint.load import read_config
    from xscale.checkpoint.tools.tools import find_checkpoint
    from xscale.run.load_run import plugins_of

    path = find_checkpoint(path)
    config = read_config(path)
    say(f"{path}: step {manifest.read(path).step}")
    if config.get("lora") is not None:
        fix = "Merge it with `xscale checkpoint merge-lora RUN MERGED`, and export MERGED."
        raise ConfigError(str(path), "the formats of export have no place for LoRA", fix)
    with plugins_of(config, path, imported=plugins):
        if to == UNIVERSAL:
            from xscale.convert.deepspeed import export_universal

            return export_universal(path, out)
        if to == MEGATRON:
            from xscale.commands.checkpoints.megatron import export_megatron

            return export_megatron(path, out, tolerance=tolerance, ema=ema)
        from xscale.convert.hf.export_model import export_model

        return export_model(path, out, architecture=architecture, tolerance=tolerance, ema=ema)


def import_checkpoint(
    source: Path,
    run: Path,
    config: Path | None,
    overrides: list[str],
    origin: str,
    tolerance: float,
) -> int:
    """Create the run folder `run` from `source`, which is in the format `origin`; the exit status."""
    check_format("--from", origin)
    if origin == UNIVERSAL:
        from xscale.commands.checkpoints.import_deepspeed import import_universal

        return import_universal(source, run, config, overrides)
    if origin == MEGATRON:
        from xscale.commands.checkpoints.megatron import import_megatron

        return import_megatron(source, run, config, overrides, tolerance=tolerance)
    from xscale.commands.checkpoints.import_hf import import_run

    return import_run(source, run, config, overrides, tolerance=tolerance)
