"""Moved modules: imports by the old name work for one version, with a warning that says the new one.

So do imports of classes and functions that moved, where the module that they left is still there.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

Moves = tuple[tuple[str, str, str], ...]
"""Where something was, where it is now, and the names of what moved."""


def _table(text: str) -> Moves:
    """Read lines `old -> new: names`."""
    rows = (line.replace(" -> ", ": ").split(": ") for line in text.split("\n"))
    return tuple((old, new, names) for old, new, names in rows)


MOVES = _table("""\
xscale.nn -> xscale.nn.adapt: lora mup observed_states
xscale.nn -> xscale.nn.head: class_head boundary_head length_head distilled_head pooler sentence_contrast
xscale.nn -> xscale.nn.head: distillation
xscale.nn -> xscale.nn.model: multi_token t_fixup
xscale.nn -> xscale.nn.ffn: moe
xscale.nn -> xscale.nn.blocks: block stack stack_checks
xscale.nn -> xscale.nn.residual: residual_gain reversible
xscale.nn.blocks -> xscale.nn.residual: residual_gain reversible
xscale.nn -> xscale.nn.depth: early_exit edges exits gates layer_mix mask_decoder sequence_pooling sharing
xscale.nn -> xscale.nn.depth: quaternion
xscale.nn -> xscale.nn.compiling: eager traceable_property
xscale.nn.moe -> xscale.nn.ffn.moe: router assignment experts permutation routing statistics upcycle
xscale.train -> xscale.settings: settings hidden_tokens scored_text
xscale.train -> xscale.step: batches step_batches
xscale.train -> xscale.run: run_entries run_folder run_facts saved_state state init_run init_weights load_run
xscale.train -> xscale.distill: distill distill_check teacher teacher_source
xscale.train -> xscale.generate: generate generate_text beam_search parallel_decoding
xscale.train -> xscale.evaluate: evaluate sliding_window exit_curve budget_curve tasks lm_eval_model text_scorer
xscale.train -> xscale.evaluate: bleu label_baseline
xscale.data -> xscale.data.source: listing files
xscale.data -> xscale.data.corpus: prepare prepared shards corpus_state labels verify inspect split_sentences
xscale.data -> xscale.data.corpus: stored_tokenizer stats histogram train_tokenizer
xscale.data -> xscale.data.samples: packed pairs labelled sentences loader blend
xscale.core -> xscale.core.files: atomic_write file_lock file_safety run_files
xscale.core -> xscale.core.config_keys: keys present_keys override_path overrides schema
xscale.checkpoint -> xscale.checkpoint.tools: consolidate
xscale.observe -> xscale.observe.trackers: tensorboard wandb mlflow""")
"""Modules, from package to package."""
MOVED_NAMES = _table("""\
xscale.checkpoint.async_saver -> xscale.checkpoint.staging: Staging
xscale.convert.hf.t5 -> xscale.convert.hf.switch: dropless
xscale.convert.hf.tokenizer -> xscale.convert.hf.special_ids: SpecialIds export_generation_config keep_special_ids
xscale.convert.hf.tokenizer -> xscale.convert.hf.special_ids: kept_special_ids special_ids
xscale.core.config -> xscale.core.key_words.config_problems: PartFamily
xscale.core.errors -> xscale.core.choices: Choice
xscale.core.yaml_reader -> xscale.core.yaml_writer: block_text flow_text
xscale.data.corpus.prepared -> xscale.data.corpus.manifest: Counts DatasetManifest labels_of_manifest
xscale.data.corpus.shards -> xscale.data.corpus.merge_shards: check_skipped merge_shards skipped_sentence
xscale.data.corpus.shards -> xscale.data.corpus.merge_shards: unknown_sentence
xscale.generate.generate -> xscale.generate.decoders: incremental
xscale.mesh.collectives -> xscale.mesh.differentiable_collectives: all_to_all copy_in gather_in gather_out
xscale.mesh.collectives -> xscale.mesh.differentiable_collectives: scatter_out slice_in sum_out
xscale.mesh.mesh -> xscale.mesh.rank_groups: RankGroup group_of_collective
xscale.nn.attention.ops.gathered -> xscale.nn.attention.ops.in_block_mask: DocumentMask InBlockMask
xscale.nn.mixer.s4 -> xscale.nn.mixer.state_space: Chunk StateSpace diagonal_plus_correction hippo_legs
xscale.nn.norm.norm -> xscale.nn.norm.batch_statistics: BatchNorm BatchStatisticsNorm PowerNorm check_places rows_of
xscale.parallel.pipeline.stage -> xscale.parallel.pipeline.stubs: NoHidden PassThrough ReceivedHandedOn
xscale.parallel.pipeline.stage -> xscale.parallel.pipeline.stubs: ReceivedHidden ReceivedSentences ReceivedStream
xscale.parallel.pipeline.stage -> xscale.parallel.pipeline.stubs: ReceivedTensor SendHidden SendSentences StageInput
xscale.parallel.steps -> xscale.parallel.plan_step: Step StepSettings
xscale.run.run_folder -> xscale.run.config_changes: changes_since check_same_config differences flatten how_to_fix
xscale.run.run_folder -> xscale.run.config_changes: lookup one_line problems_of with_defaults with_new_names
xscale.train.run -> xscale.train.resume: Resumed make_in_memory_checkpoint resume""")
"""Classes and functions, from module to module, where the module that they left is still there."""


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
        _warn(module.__name__, self.new, _depth_of_importer())


class MovedNames(MetaPathFinder):
    """Finds modules from which classes or functions moved, before Python does, and gives them the old names.

    A name that such a module imports for itself is found in it as before, without a warning.
    """

    def __init__(self) -> None:
        self.moved: dict[str, dict[str, str]] = {}
        for old, new, names in MOVED_NAMES:
            self.moved.setdefault(old, {}).update(dict.fromkeys(names.split(), new))
        for old in self.moved.keys() & sys.modules.keys():
            _give_old_names(sys.modules[old], self.moved[old])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in self.moved else None
        if spec is not None and spec.origin is not None:
            spec.loader = _LoaderWithOldNames(fullname, spec.origin, self.moved[fullname])
        return spec


class _LoaderWithOldNames(SourceFileLoader):
    """Loads a module as Python does, and gives it the old names."""

    def __init__(self, fullname: str, path: str, moved: dict[str, str]) -> None:
        super().__init__(fullname, path)
        self.moved = moved

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _give_old_names(module, self.moved)


def _give_old_names(module: ModuleType, moved: dict[str, str]) -> None:
    """Let the module find each of the names `moved`, which it has no more, in the module that has it now."""

    def old_name(name: str) -> Any:
        old = f"{module.__name__}.{name}"
        if name not in moved:
            raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'")
        _warn(old, f"{moved[name]}.{name}", 2)
        return getattr(importlib.import_module(moved[name]), name)

    vars(module)["__getattr__"] = old_name


def _warn(old: str, new: str, depth: int) -> None:
    """Warn of an old name in the frame that is `depth` above the caller's."""
    message = f"{old} is now {new}; the old name will be refused in the next version"
    warnings.warn(message, FutureWarning, stacklevel=depth + 1)


def _depth_of_importer() -> int:
    """Return how far above `exec_module` the import statement is: behind the frames of Python's own importing."""
    depth = 2
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
        depth += 1
    return depth
