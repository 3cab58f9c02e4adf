"""`xscale checkpoint merge-lora`: create a run whose linear maps contain what LoRA added to them."""

from collections.abc import Callable
from pathlib import Path

from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.core.say import say as say_shown
from xscale.nn.adapt.lora import merge_lora
from xscale.run.init_run import create_run, model_from_weights, require_no_run
from xscale.run.load_run import load_run


def merge_run(
    source: Path, run: Path, say: Callable[[str], None] = say_shown, *, plugins: bool = False
) -> int:
    """Create the run folder `run` at step 0, without LoRA, from the newest checkpoint of the run `source`, or it.

    Returns the exit status. ConfigError when the run has no LoRA, or `run` already exists.
    """
    require_no_run(run)
    loaded = load_run(source, plugins=plugins)
    if loaded.settings.lora is None:
        raise ConfigError(
            str(source),
            "the run has no LoRA to merge",
            "Give the run.dir of one with a section lora.",
        )
    of_run = loaded.settings.run.model_copy(update={"dir": str(run)})
    settings = loaded.settings.model_copy(update={"lora": None, "run": of_run})
    weights = merge_lora(loaded.model)
    model = model_from_weights(settings, loaded.tokenizer.vocabulary, weights)
    path = create_run(
        settings,
        model,
        run,
        tokenizer=loaded.tokenizer,
        unpadded_vocabulary=loaded.unpadded_vocabulary,
    )
    say(
        f"{path}: written, with the LoRA of step {loaded.step} merged; `xscale checkpoint export` exports it"
    )
    return EXIT_DONE
