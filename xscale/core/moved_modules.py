"""Modules that moved: imports by the old name work for one version, with a warning that says the new one."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVES = (
    ("xscale.nn", "xscale.nn.adapt", "lora mup observed_states"),
    (
        "xscale.nn",
        "xscale.nn.head",
        "class_head boundary_head length_head distilled_head pooler sentence_contrast",
    ),
    ("xscale.nn", "xscale.nn.head", "distillation"),
    ("xscale.nn", "xscale.nn.model", "multi_token t_fixup"),
    ("xscale.nn", "xscale.nn.ffn", "moe"),
    ("xscale.nn", "xscale.nn.blocks", "block stack stack_checks"),
    ("xscale.nn", "xscale.nn.residual", "residual_gain reversible"),
    ("xscale.nn.blocks", "xscale.nn.residual", "residual_gain reversible"),
    (
        "xscale.nn",
        "xscale.nn.depth",
        "early_exit edges exits gates layer_mix mask_decoder sequence_pooling sharing",
    ),
    ("xscale.nn", "xscale.nn.depth", "quaternion"),
    ("xscale.nn", "xscale.nn.compiling", "eager traceable_property"),
    (
        "xscale.nn.moe",
        "xscale.nn.ffn.moe",
        "router assignment experts permutation routing statistics upcycle",
    ),
    ("xscale.train", "xscale.settings", "settings hidden_tokens scored_text"),
    ("xscale.train", "xscale.step", "batches step_batches"),
    (
        "xscale.train",
        "xscale.run",
        "run_entries run_folder run_facts saved_state state init_run init_weights load_run",
    ),
    ("xscale.train", "xscale.distill", "distill distill_check teacher teacher_source"),
    ("xscale.train", "xscale.generate", "generate generate_text beam_search parallel_decoding"),
    (
        "xscale.train",
        "xscale.evaluate",
        "evaluate sliding_window exit_curve budget_curve tasks lm_eval_model",
    ),
    ("xscale.train", "xscale.evaluate", "text_scorer bleu label_baseline"),
    ("xscale.data", "xscale.data.source", "listing files"),
    (
        "xscale.data",
        "xscale.data.corpus",
        "prepare prepared shards corpus_state labels verify inspect",
    ),
    (
        "xscale.data",
        "xscale.data.corpus",
        "split_sentences stored_tokenizer stats histogram train_tokenizer",
    ),
    ("xscale.data", "xscale.data.samples", "packed pairs labelled sentences loader blend"),
    ("xscale.core", "xscale.core.files", "atomic_write file_lock file_safety run_files"),
    ("xscale.core", "xscale.core.config_keys", "keys present_keys override_path overrides schema"),
    ("xscale.checkpoint", "xscale.checkpoint.tools", "consolidate"),
    ("xscale.observe", "xscale.observe.trackers", "tensorboard wandb mlflow"),
)
"""Package where the modules were, package where they are, names of the modules."""


class MovedModules(MetaPathFinder):
    """Finds modules by their old names, after Python has found none of that name."""

    def __init__(self) -> None:
        self.moved = {
            f"{old}.{name}": f"{new}.{name}" for old, new, names in MOVES for name in names.split()
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = self.new_name(fullname)
        return None if new is None else ModuleSpec(fullname, _MovedModule(new), is_package=True)

    def new_name(self, name: str) -> str | None:
        """Return where the module is now, or None. What was below a package that moved is below its new place."""
        package, below = name, ""
        while package:
            if package in self.moved:
                return self.moved[package] + below
            package, _, last = package.rpartition(".")
            below = f".{last}{below}"
        return None


class _MovedModule(Loader):
    """Gives a module of the old name everything that the module of the new name has."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        moved = importlib.import_module(self.new)
        module.__dict__.update(
            {name: value for name, value in vars(moved).items() if not name.startswith("__")}
        )
        old = module.__name__
        message = f"{old} is now {self.new}; the old name will be refused in the next version"
        warnings.warn(message, FutureWarning, stacklevel=_depth_of_importer())


def _depth_of_importer() -> int:
    """Return how far above `exec_module` the import statement is: behind the frames of Python's own importing."""
    depth = 2
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
        depth += 1
    return depth
