"""`xscale checkpoint upcycle`: initialise a run with mixtures of experts from a dense run's newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from xscale.core.compose import compose
from xscale.core.config import decode
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.core.say import say as say_shown
from xscale.evaluate.evaluate_run import evaluation_data
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.upcycle import upcycle, why_output_changes
from xscale.parallel.plan import DTYPES
from xscale.parallel.precision import precision
from xscale.recipe import Recipe
from xscale.run.init_run import create_run, model_from_weights, require_no_run
from xscale.run.load_run import LoadedRun, load_run, single_process
from xscale.run.run_folder import CONFIG
from xscale.run.token_counts import require_no_counts
from xscale.settings.settings import build_on_meta


def upcycle_run(
    dense: Path,
    run: Path,
    overrides: list[str],
    sequences: int = 64,
    say: Callable[[str], None] = say_shown,
    *,
    plugins: bool = False,
) -> int:
    """Create the run folder `run` at step 0 from the run folder `dense` or a checkpoint; returns the status.

    The config is the dense run's with `overrides`, which replace ffns by mixtures; its layout and its plugins (unless
    `plugins`) do not bind this process. Reports both models' losses on the first validation sequences. Raises
    ConfigError if a weight does not fit, or `run` already exists.
    """
    require_no_run(run)
    loaded = load_run(dense, plugins=plugins)
    # `dense` may be one of its checkpoints.
    folder = dense if (dense / CONFIG).exists() else dense.parent.parent
    composed = compose(folder / CONFIG, overrides)
    settings = decode(Recipe, composed.data, composed.origin)
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"dir": str(run)})}
    )
    if problems := single_process(settings).check():
        raise ConfigError(problems)
    vocabulary = loaded.tokenizer.vocabulary
    meta_model = build_on_meta(settings, vocabulary)
    fix = "Give the router's frequencies, or take another function of its hash."
    require_no_counts(meta_model, "upcycle", fix)
    mixtures = {
        path: module for path, module in meta_model.named_modules() if isinstance(module, Moe)
    }
    weights = {sharded.name: sharded.parameter.detach() for sharded in loaded.parameters}
    upcycled = {path: moe for path, moe in mixtures.items() if f"{path}.up.weight" in weights}
    if not upcycled:
        what = "the overrides turn no dense ffn of that run into a mixture"
        fix = "Give overrides such as 'model.stack.block.ffn={kind: moe, experts: 8, expert: ...}'."
        raise ConfigError("upcycle", what, fix)
    unpadded = loaded.unpadded_vocabulary
    model = model_from_weights(
        settings, vocabulary, upcycle(meta_model, weights, settings.run.seed), unpadded
    )
    changed = False
    for path, moe in upcycled.items():
        for reason in why_output_changes(moe, weights[f"{path}.up.weight"].shape[0]):
            changed = True
            say(f"{path}: its output changes, because {reason}")
    path = create_run(
        settings, model, run, tokenizer=loaded.tokenizer, unpadded_vocabulary=unpadded
    )
    _compare(loaded, model, settings, sequences, changed, say)
    say(f"{path}: written from step {loaded.step}; train it with `xscale train {run}/config.yaml`")
    return EXIT_DONE


def _compare(
    loaded: LoadedRun,
    model: nn.Module,
    settings: Recipe,
    sequences: int,
    changed: bool,
    say: Callable[[str], None],
) -> None:
    precision.apply(model, DTYPES[settings.precision.compute], DTYPES[settings.precision.master])
    model.to(loaded.mesh.device)
    try:
        with evaluation_data(loaded) as data:
            if data is None:
                say("the run has no validation documents, so no losses are compared")
                return
            count = min(sequences, data.sequences)
            before, after = (
                data.evaluate(candidate, count).loss for candidate in (loaded.model, model)
            )
    except ConfigError as error:
        say(f"no losses are compared: {error.problems[0]}")
        return
    why = "" if changed else " (only rounding may differ)"
    step = loaded.step
    say(
        f"validation loss of {count} sequences: {before:.6f} dense at step {step}, {after:.6f} as a mixture{why}"
    )
