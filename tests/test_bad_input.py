"""Bad input gets a sentence that names the place and what would work, exit status 2, and nothing half-written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xscale.cli.main import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "run" / "quickstart.yaml"

MISTAKES = {
    "a misspelt key": (["modle.width=8"], "modle", "Did you mean 'model'?"),
    "a misspelt key inside a part": (["model.stack.block.mixer.hedas=4"], "mixer.hedas", "Did you mean 'heads'?"),
    "a key of another section": (["parallel.pp=2"], "parallel.pp", "Did you mean 'parallel.mesh.pp'?"),
    "a key of a part": (["lr=1e-4"], "lr (command line)", "Did you mean 'optimizer.lr'?"),
    "a misspelt key beside others of its name": (["train.step=3"], "train.step", "Did you mean 'steps'?"),
    "a key without its section": (["batch_size=8"], "batch_size", "Did you mean 'train.batch_size'?"),
    "a value of the wrong type": (
        ["train.steps=many"],
        "train.steps (command line)",
        "must be a valid integer, got 'many'",
    ),
    "a value out of range": (["train.batch_size=0"], "train.batch_size", "must be >= 1, got 0"),
    "a rate that is no number": (["optimizer.lr=.nan"], "optimizer.lr", "must be a finite number, got nan"),
    "a device that does not exist": (["run.device=tpu"], "run.device", "must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
    "a kind that does not exist": (["model.position=roep"], "no position of kind 'roep'", "Did you mean 'rope'?"),
    "a causal objective on an encoder": (
        ["model.kind=encoder"],
        "'causal' needs a model that reads one sequence and is causal; 'encoder' is not one",
        "Take model.kind=decoder, or objective.kind=masked.",
    ),
    "a causal model with a mixer that is not": (
        ["model.stack.block.mixer=fourier"],
        "'fourier' is not causal, and this model is",
        "Take model.stack.block.mixer.kind=attention",
    ),
    "a causal model with a core that is not": (
        ["model.stack.block.mixer.core=linformer"],
        "'linformer' is not causal, and this model is",
        "Take model.stack.block.mixer.core.kind=softmax",
    ),
    "documents that a mixer cannot mask": (
        ["model={kind: encoder, stack: {block: {mixer: fourier}}}", "objective=masked"],
        "mixer 'fourier' cannot mask the documents",
        "Take true, or model.stack.block.mixer.kind=attention",
    ),
    "heads that do not divide": (["model.stack.block.mixer.heads=7"], "heads=7 does not divide width=256", "Take"),
    "kv_heads that do not divide": (
        ["model.stack.block.mixer.kv_heads=3"],
        "kv_heads=3 does not divide heads=4",
        "Take 1, 2 or 4.",
    ),
    "ep that does not divide": (["parallel.mesh.ep=2"], "parallel.mesh.ep: ep=2 does not divide", "Take 1."),
    "ranks that are not there": (
        ["parallel.mesh.dp_shard=4"],
        "gives 4 ranks, but the world size is 1",
        "Or start 4 processes.",
    ),
    "a batch that micro-batches do not divide": (
        ["train.micro_batch_size=3"],
        "micro_batch_size=3 x dp=1 does not divide",
        "Take train.micro_batch_size=1, 2, 4 or 8.",
    ),
    "a schedule longer than the run": (
        ["schedule={kind: wsd, warmup_steps: 200, decay_steps: 200}"],
        "exceeds train.steps=260",
        "Take 60. Lower values work too.",
    ),
    "a GPU that is not there": (["run.device=cuda"], "no GPU that torch can use", "run.device=cpu"),
    "files that are not there": (["data.source={kind: text, paths: [nowhere]}"], "nowhere", ""),
    "data that is not there": (["data.prepared=nowhere"], "nowhere", ""),
    "a value without a space before it": (
        ["data.tokenizer={kind:byte}"],
        "data.tokenizer.kind:byte (command line): unknown key. A value needs a space before it: {kind: byte}.",
    ),
    "a text that YAML takes for a mapping": (
        ["run.dir=summarize: "],
        "run.dir (command line): must be a text, got a mapping. Put a text with a colon in quotes: dir='\"text: \"'.",
    ),
    "an override that is none": (["train.steps"], "an override is written key=value", "train.steps=20"),
    "a master narrower than compute": (["precision.compute=float64"], "precision.master", "Take float64"),
}


def xscale(*words: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The program as a user starts it, in an empty folder."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
    argv = [sys.executable, "-m", "xscale", *words]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)


def refused(done: "subprocess.CompletedProcess[str]", *sentences: str) -> None:
    """Status 2, each sentence said, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for sentence in sentences:
        assert sentence in done.stderr, done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within this process, because there are many and importing torch is most of a process's time."""
    overrides, *sentences = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", "train", str(QUICKSTART), f"run.dir={tmp_path / 'run'}", *overrides])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert all(sentence in said for sentence in sentences), said
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    # Data is never made for a run that cannot be: these are found first, or are in the data itself.
    assert not list(tmp_path.glob("work/**/*.bin"))


FAULTS = {
    "train.steps": "an override is written key=value",
    "optimizer.lr=-1": "optimizer.lr (command line): must be >= 0, got -1",
    "modle.a=1": "unknown key. Did you mean 'model'?",
    "model.stack.block.mixer.heads=7": "heads=7 does not divide width=256",
    "schedule={kind: wsd, warmup_steps: 200, decay_steps: 200}": "exceeds train.steps=260",
    "parallel.mesh.cp=3": "cp 3 = 3 does not divide the 1 rank",
    "parallel.zero.offload.optimizer=cpu": "the torch engine does not offload",
    "train.micro_batch_size=3": "micro_batch_size=3 x dp=1 does not divide",
    "run.device=cuda": "no GPU that torch can use",
    "data.source={kind: text, paths: [nowhere, neither]}": "'neither' matches no file",
}
"""Overrides, each with a fault of another stage: of syntax, type, bounds, parts, layout, machine and files."""


def test_all_faults_of_all_stages_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", "train", str(QUICKSTART), f"run.dir={tmp_path / 'run'}", *FAULTS])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert [sentence for sentence in FAULTS.values() if sentence not in said] == [], said
    assert "'nowhere' matches no file" in said
    # The data section is valid, and what depends on a refused section is not guessed from its defaults.
    assert len(said.splitlines()) == len(set(said.splitlines())) == len(FAULTS) + 2, said


def test_a_refused_section_hides_only_what_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.stack.depth=0", "parallel.mesh.tp=3", "parallel.mesh.ep=3", "data.source=[]", "train.batch_size=5"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", "plan", str(QUICKSTART), "--check", "--world", "3", *words])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "model.stack.depth" in said
    assert "data.source" in said
    assert "micro_batch_size" in said
    # Whether tp divides the heads, and ep the experts, nobody knows of a model that was refused.
    assert "heads" not in said, said
    assert "experts" not in said, said


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ([], "Take parallel.mesh.cp=2."),
        (["model.position={kind: relative}"], "Take parallel.mesh.cp=2."),
    ],
)
def test_a_refused_cp_names_what_would_work_for_these_heads(
    more: list[str],
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model.stack.block.mixer={heads: 6, kv_heads: 2, head_width: 32}", "parallel.context.style=ulysses"]
    refused_with = ["plan", str(QUICKSTART), "--check", "--world", "4", *words, *more, "parallel.mesh.cp=4"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["xscale", *refused_with])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert "cp x tp = 4 does not divide heads=6" in said
    assert fix in said, said


@pytest.mark.nightly
def test_a_warm_up_of_a_shortened_run_is_shortened_and_one_of_its_own_is_warned_of(tmp_path: Path) -> None:
    done = xscale("plan", str(QUICKSTART), "--check", "train.steps=20", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert "schedule.warmup_steps=2" in done.stderr
    both = xscale("plan", str(QUICKSTART), "--check", "train.steps=20", "schedule.warmup_steps=30", folder=tmp_path)
    assert "xscale: warning: schedule.warmup_steps" in both.stderr
    assert xscale("plan", str(QUICKSTART), "--check", folder=tmp_path).stderr == ""


@pytest.mark.parametrize("words", [["train"], ["plan"], ["data", "prepare"], ["data", "tokenizer"], ["compare"]])
@pytest.mark.parametrize("text", [None, "train: {steps: 3\nmodel: ["])
def test_a_config_that_cannot_be_read_is_refused_before_torch_is_imported(
    words: list[str], text: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    argv = ["xscale", *words, str(file)]
    program = f"import sys; sys.argv = {argv}\nfrom xscale.cli.main import main\ntry: main()\n"
    program += "except SystemExit as left: sys.exit(left.code if 'torch' not in sys.modules else 'torch is imported')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    refused(done, "run.yaml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(b"", "is empty", marks=pytest.mark.nightly),
        pytest.param(b"\x00\x01binary\x00" * 50, "NUL", marks=pytest.mark.long),
        (b"\xff\xfe text", "UTF-8"),
    ],
)
def test_a_corpus_that_is_no_text(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(content)
    source = f"data.source={{kind: text, paths: [{tmp_path / 'corpus.txt'}]}}"
    done = xscale("train", str(QUICKSTART), f"run.dir={tmp_path / 'run'}", source, folder=tmp_path)
    refused(done, "corpus.txt")
    assert sentence in done.stderr or "no document" in done.stderr, done.stderr


def test_a_config_that_is_not_there_or_no_yaml(tmp_path: Path) -> None:
    refused(xscale("train", "quickstrat.yaml", folder=QUICKSTART.parent), "quickstrat.yaml", "mean quickstart.yaml or")
    (tmp_path / "broken.yaml").write_text("train: {steps: 3\nmodel: [", encoding="utf-8")
    refused(xscale("train", "broken.yaml", folder=tmp_path), "broken.yaml:", "this is not YAML")


@pytest.mark.long
def test_ranks_say_it_once(tmp_path: Path) -> None:
    """Every rank finds a config's fault; the first says it."""
    said = [
        xscale("train", str(QUICKSTART), "modle.a=1", folder=tmp_path, RANK=rank, WORLD_SIZE="2").stderr
        for rank in ("0", "1")
    ]
    assert "modle" in said[0]
    assert said[1] == ""


@pytest.mark.long
def test_a_full_disk_ends_a_save_with_a_sentence(tmp_path: Path) -> None:
    """The last save must succeed: status 1, no traceback, no half-written checkpoint that could be taken for one."""
    words = [f"run.dir={tmp_path / 'run'}", "train.steps=1", "train.eval_every=0", "train.sample.prompts=[]"]
    small = ["data.tokenizer=byte", "data.workers=1", f"data.source={{kind: text, paths: [{ROOT / 'LICENSE'}]}}"]
    small += ["data.sequence_length=64", "data.validation=0", "schedule.warmup_steps=0", "train.baseline=false"]
    small += ["observe.tensorboard=false", "observe.report=false"]
    # A limit on the size of a file stands for a disk that is full: the tensors are larger, the tokens are not.
    code = "import resource,sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000)); import runpy;"
    code += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += "sys.argv = ['xscale', *sys.argv[1:]]; runpy.run_module('xscale', run_name='__main__')"
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "launch"))
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(QUICKSTART), *words, *small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "checkpoints" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
