"""Where a law is bent, and why. An entry that is no longer needed fails, so the table only says what is true."""

import re

MPI = "MPI's library alone knows the ranks that mpirun started; imported when that is asked for, and not needed else"
FUSED_DROPOUT = "the kernel of dropout and residual draws itself; xscale.nn.random alone calls it, at global shapes"
INITIALISER = "initial weights: a function of the seed and the parameter's name, drawn in this one place"
DEEPSPEED = "DeepSpeed has no argument for it, and reads a global"
CHECKED = "a part alone in a check, in one process: its weights are its inputs"
READER = "a file reader of torch, made to read without unpickling; it talks to nobody"
EXPORT = "an export writes a folder that was not there, which it made"
FOREIGN = "a library opens files of a model that the user names, of which this package has looked at the small ones"
RESULTS = "results and inputs of a benchmark, in a folder that the user names"
OF_PACKAGE = "a file of this package, or of the user's that is no run's"
OF_FILES = "of the tokenizer that a run has opened, whose tokens no change of a recipe that could be tried gives it"
ROUTES = "a file of routes that the user names, which may be shared by a link and is only mapped"
CORPUS = "a corpus that the user names, its prepared data, or the example of a source in a temporary folder"
BENT: dict[str, dict[str, str]] = {
    # law -> {path, `path: what` or `path:function`: the reason}
    "imports": {
        "launch/xscale_launch/mpi/mpi_rank.py: mpi4py": MPI,
        "launch/xscale_launch/mpi/mpi_rank.py: mpi4py.MPI": MPI,
        "launch/xscale_launch/profile.py: yaml": "for who writes profiles as YAML; without it TOML is asked for",
    },
    "random draws": {
        "xscale/nn/init.py: Generator": INITIALISER,
        "xscale/nn/init.py: normal_": INITIALISER,
        "xscale/nn/init.py: uniform_": INITIALISER,
        "kernels/xscale_kernels/bias_dropout_residual/cpu.py: rand": FUSED_DROPOUT,
        "kernels/xscale_kernels/bias_dropout_residual/op.py: dropout": FUSED_DROPOUT,
        "kernels/xscale_kernels/bias_dropout_residual/triton.py: rand4x": FUSED_DROPOUT,
        "kernels/xscale_kernels/bias_dropout_residual/triton.py: randint": FUSED_DROPOUT,
    },
    "seams": dict.fromkeys(
        (
            "xscale/bench/parallel/torch_side.py: attend",
            "xscale/bench/parallel/torch_side.py: embed",
            "xscale/bench/parallel/torch_side.py: head",
            "xscale/bench/parallel/torch_side.py: norm",
            "xscale/bench/parallel/torch_side.py: setattr",
        ),
        "the baseline is a plain torch model of its own, which declares no seams",
    )
    | {
        "xscale/parallel/context/ulysses.py: first_head": "of a forward with other heads, set back after it",
        "xscale/bench/start/worker.py: setattr": "of functions that a benchmark times, in a process of its own",
        "xscale/bench/llama.py: weight": "the baseline is a plain torch model, whose head has the embedding's weights",
        "xscale/bench/gpu/results.py: size": "of an entry in an archive, which is no module",
    },
    "three moves": {
        "xscale/commands/checkpoints/gpt_model.py: torch.distributed.checkpoint.filesystem": READER,
        "xscale/commands/checkpoints/gpt_model.py: torch.distributed.checkpoint.filesystem.FileSystemReader": READER,
    },
    "weight writes": {
        "xscale/nn/post_step.py: copy_": "this is the writer of weights itself",
        "xscale/parallel/shard/full_tensors.py: copy_": "this is the writer of shards itself",
        "xscale/checkpoint/in_memory.py: copy_": "shards that the engine gave out to be loaded; "
        "`Engine.after_load` frees what was gathered from them",
        "xscale/conformance/attention/core.py: copy_": CHECKED,
        "xscale/conformance/attention/core_extremes.py: copy_": CHECKED,
        "xscale/conformance/attention/core_running_stats.py: data": CHECKED,
        "xscale/conformance/attention/mixer_extremes.py: copy_": CHECKED,
        "xscale/conformance/block/norm.py: copy_": CHECKED,
        "xscale/conformance/small_parts.py: add_": CHECKED,
        "xscale/commands/checkpoints/gpt_model.py: copy_": "the weights of Megatron-LM's model, in one process",
        "xscale/parallel/precision/precision.py: data": "another dtype of the same weights, in a process that infers",
        "xscale/generate/generate.py: data": "another memory order of the same weights, in a process that infers",
    },
    "who cuts": {
        "xscale/nn/adapt/lora.py: rank": "the rank of a matrix, as the paper calls it",
        "xscale/nn/attention/transformer_ls.py: projection_rank": "the rank of a matrix, as the paper calls it",
    },
    "no unpickler": {
        "xscale/bench/checkpoint.py: pickle.loads": "what this process has just pickled, in this process's memory",
        "xscale/mesh/flight_recorder.py: pickle.loads": "torch's record of this process, in this process's memory",
    },
    "one reader of YAML": {
        "launch/xscale_launch/profile.py: yaml.load": "the launcher runs without xscale, and believes its profiles",
        "launch/xscale_launch/profile.py: yaml.BaseLoader": "the launcher runs without xscale; all values are texts",
    },
    "text to ids": {
        "xscale/conformance/tokenizer.py: encode": "the tokenizer itself is checked",
        "xscale/conformance/tokenizer.py: encode_with_offsets": "the tokenizer itself is checked",
        "xscale/convert/hf/tokenizer.py: encode": "the same text in two libraries: its begin is compared apart",
        "xscale/convert/hf/tokenizers_library.py: encode": "the id of one byte, not a text: the vocabulary is copied",
        "plugins/xscale_tinybert/augment.py: encode_with_offsets": "its `ModelInput` has the begin and the end",
        "xscale/data/corpus/labels.py: encode": "the objective writes the token before the first of an example's texts",
        "xscale/data/corpus/shards.py: encode": "sentences of a document, which an objective joins to what it reads",
        "xscale/generate/generate.py: encode": "the text behind a gap, which is in the middle of a document",
    },
    "one opener": {
        "xscale/convert/deepspeed.py: torch.save": EXPORT,
        "xscale/convert/deepspeed.py: .write_text": EXPORT,
        "xscale/convert/hf/export_model.py: .write_text": EXPORT,
        "xscale/convert/hf/export_model.py: safetensors.torch.save_file": EXPORT,
        "xscale/convert/hf/special_ids.py: .write_text": EXPORT,
        "xscale/convert/hf/tokenizer.py: .write_bytes": EXPORT,
        "xscale/convert/hf/tokenizer.py: .write_text": EXPORT,
        "xscale/commands/checkpoints/megatron.py: .write_text": EXPORT,
        "xscale/convert/hf/compare.py: .from_pretrained": FOREIGN,
        "xscale/convert/hf/config_json.py: .from_pretrained": FOREIGN,
        "xscale/convert/hf/tokenizer.py: .from_pretrained": FOREIGN,
        "xscale/convert/hf/import_model.py: safetensors.safe_open": FOREIGN,
        "xscale/bench/compare.py: .read_text": RESULTS,
        "xscale/bench/decode.py: .save_pretrained": RESULTS,
        "xscale/bench/decode.py: .write_text": RESULTS,
        "xscale/bench/early_exit.py: .open": RESULTS,
        "xscale/bench/early_exit.py: .read_text": RESULTS,
        "xscale/bench/early_exit.py: .write_text": RESULTS,
        "xscale/bench/gpu/pages.py: .write_text": RESULTS,
        "xscale/bench/gpu/pages.py: .read_text": RESULTS,
        "xscale/bench/gpu/processes.py: .open": RESULTS,
        "xscale/bench/gpu/results.py: .write_text": RESULTS,
        "xscale/bench/gpu/results.py: tarfile.open": RESULTS,
        "xscale/bench/gpu/results.py: .read_bytes": RESULTS,
        "xscale/bench/ladder.py: .read_text": RESULTS,
        "xscale/bench/operators/report.py: .write_text": RESULTS,
        "xscale/bench/torchrun.py: .write_text": RESULTS,
        "xscale/bench/train.py: .export_chrome_trace": RESULTS,
        "xscale/cli/bench/commands.py: .write_text": RESULTS,
        "xscale/commands/study/compare.py: .write_text": RESULTS,
        "kernels/xscale_kernels/cuda_library.py: .read_text": OF_PACKAGE,
        "kernels/xscale_kernels/cuda_library.py: .open": OF_PACKAGE,
        "xscale/commands/json_schema.py: .write_text": OF_PACKAGE,
        "xscale/commands/show/catalogue.py: .read_text": OF_PACKAGE,
        "xscale/commands/show/modes.py: .read_text": OF_PACKAGE,
        "xscale/commands/show/find_modes.py: .write_text": OF_PACKAGE,
        "xscale/commands/show/recipes.py: .read_text": OF_PACKAGE,
        "xscale/commands/show/recipe_file.py: .open": OF_PACKAGE,
        "xscale/commands/show/recipe_file.py: os.link": OF_PACKAGE,
        "xscale/conformance/tokenizer.py: .read_text": OF_PACKAGE,
        "xscale/core/config.py: .read_text": OF_PACKAGE,
        "xscale/cli/terminal/streams.py: os.open": OF_PACKAGE,
        "xscale/cli/terminal/streams.py: open": OF_PACKAGE,
        "launch/xscale_launch/snapshot.py: shutil.copytree": OF_PACKAGE,
        "launch/xscale_launch/snapshot.py: shutil.copy2": OF_PACKAGE,
        "plugins/xscale_tinybert/resumable_file.py: .open": CORPUS,
        "xscale/data/corpus/corpus_state.py: open": CORPUS,
        "xscale/data/indexed.py: numpy.memmap": CORPUS,
        "xscale/data/routes/read.py: .open": ROUTES,
        "xscale/data/source/files.py: open": CORPUS,
        "xscale/data/source/files.py: gzip.open": CORPUS,
        "xscale/data/source/jsonl.py: .write_text": CORPUS,
        "xscale/data/source/labelled.py: .write_text": CORPUS,
        "xscale/data/source/labelled.py: .open": CORPUS,
        "xscale/data/source/pairs.py: .write_text": CORPUS,
        "xscale/data/source/pairs.py: .open": CORPUS,
        "xscale/data/source/text.py: .write_text": CORPUS,
        "xscale/checkpoint/torch_file.py: zipfile.ZipFile": "an archive in a file that is open",
        "xscale/convert/hf/tokenizer.py: .save_pretrained": "into a folder of a run that the import has looked at",
        "xscale/train/profiler.py: .export_chrome_trace": "torch writes the trace; what stood there is removed first",
        "xscale/checkpoint/disk.py: .touch": "its own hook before each change of a disk",
        "xscale/checkpoint/disk.py: os.open": "a folder, whose entries are flushed",
        "xscale/checkpoint/in_memory.py: os.open": "read and write, in a folder of /dev/shm that is this user's alone",
        "xscale/checkpoint/torch_file.py: .open": "a record of an archive that is open",
        "xscale/train/compile_cache.py: open_regular": "a file of torch.compile's cache, which is no run's",
        "launch/xscale_launch/nodes/gpu_env.py: .read_text": "the system's files of its devices",
        "launch/xscale_launch/nodes/gpu_env.py: os.open": "a device of a GPU",
        "launch/xscale_launch/supervise.py: .read_text": "the system's files of its processes",
        "launch/xscale_launch/plans/plan_cache.py: read_regular": "the user's own cache, and configs that a plan reads",
        "launch/xscale_launch/profile.py: read_regular": "the user's own profile, which may be a link",
        "launch/xscale_launch/slurm/sweep.py: .read_bytes": "a file that the user names, which may be a pipe",
    },
    "advice": {
        "xscale/distill/teacher_source.py: check_vocabulary": OF_FILES,
        "xscale/settings/scored_text.py: check_lm_eval": "of a package; the check of a recipe adds its choices",
        "xscale/settings/scored_text.py: check_scores_text": "of the run that a command is given; the "
        "check of a recipe adds its choices",
        "xscale/objective/fill_in_middle.py: check": OF_FILES,
        "xscale/objective/masked.py: check": OF_FILES,
        "xscale/objective/masked_sentences.py: check": OF_FILES,
        "xscale/objective/span.py: check": OF_FILES,
        "xscale/objective/ul2.py: check_sentinels": OF_FILES,
    },
    "nothing global": {
        "xscale/conformance/source.py: socket.socket": "a source that says that it downloads nothing is read without "
        "sockets; put back when it is read",
        "xscale/data/parallel_map.py: sys.modules": "a worker must not run the user's script again; set back at once",
        "xscale/cli/main.py: warnings.showwarning": "the interpreter's only way to show a warning otherwise; put back "
        "when the command ends",
        "xscale/cli/terminal/streams.py: sys.stdout": "None where a daemon closed it: every print would be a traceback",
        "xscale/cli/terminal/streams.py: sys.stderr": "None where a daemon closed it: a warning would be a traceback",
        "xscale/mesh/environment.py: os.environ": f"{DEEPSPEED}: a variable says on what it computes",
        "xscale/parallel/engine/deepspeed/engine.py: deepspeed.ops.__compatible_ops__": f"{DEEPSPEED}: what to build",
        "xscale/parallel/compiled_blocks.py: torch_private.dynamo_config.recompile_limit": "torch.compile of the "
        "oldest torch that we support has no argument for it; the model of a run is what the process compiles",
        "kernels/xscale_kernels/torch_private.py: config.recompile_limit": "torch.compile of the oldest torch that we "
        "support has no argument for it; only raised",
        "xscale/measure/op_tracer.py: torch.UntypedStorage.resize_": "torch tells nobody of storages that fully_shard "
        "resizes; put back when the meter is done",
        "xscale/planning/simulate_step.py: gathered.CHUNK_SCORES": "attention computes as many scores at "
        "once as on the device that is planned for, on which a simulated step is not; put back after it",
        "xscale/planning/simulate_step.py: rows.CACHE_BYTES": "kernels pass over rows in blocks of a cache, "
        "thousands of them in a plan that computes nothing; put back when the rehearsal is done",
    },
}


def unbent(law: str, violations: dict[str, str]) -> list[str]:
    """The violations (place -> what) that no entry of `law` excuses, and the entries that excuse nothing."""
    excused = BENT.get(law, {})
    found = {place: re.sub(r":\d+(: |$)", r"\1", place) for place in violations}
    broken = [f"{place}: {violations[place]}" for place, key in found.items() if key not in excused]
    idle = [f"{key}: excused from '{law}', and obeys it: take the entry out" for key in excused.keys() - found.values()]
    return sorted(broken + idle)
