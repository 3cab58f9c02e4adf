"""Tasks of lm_eval with a run's model: its scores against lm_eval's own for the exported model, in runs, on layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed import Pool
from tests.train.test_load_run import MODEL, call
from tests.train.test_sliding_window import DOUBLE, printed, trained
from tests.train.tiny import MIXTURE, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.evaluate.tasks import lm_eval_model_of_run
from xscale.evaluate.text_scorer import ScoreRequest, TextRequest, TextScorer
from xscale.observe.events import TaskReport
from xscale.run.load_run import load_run
from xscale.run.parts import RunParts
from xscale.train import run_work

lm_eval: Any = pytest.importorskip("lm_eval", reason="lm_eval is not installed")

QUESTIONS = [
    {"question": f"def f(x): # returns x + {number}\n    return", "choices": [f" x + {number}", " None", f" {number}"]}
    for number in range(7)
]
SHARED = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
CHOICE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "task": "perplexity",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}{{choices[0]}} # and this is a text that is longer than the window",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITING = {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks on a file of questions, none of which needs a network."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    files = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}
    for task in (CHOICE, ROLLING, WRITING):
        file = folder / f"{task['task']}.yaml"
        file.write_text(yaml.safe_dump({**SHARED, "dataset_kwargs": files, **task}), encoding="utf-8")
    return folder


def instances(kind: str) -> list[Any]:
    """Requests of lm_eval of one kind."""
    from lm_eval.api.instance import Instance

    texts = [(item["question"], choice) for item in QUESTIONS for choice in item["choices"]]
    arguments: dict[str, list[Any]] = {
        # Without a context, with one that ends in spaces, and with one longer than the model reads.
        "loglikelihood": [*texts, ("", "return x"), ("def f(x):   ", " return"), ("long " * 30, "text")],
        "loglikelihood_rolling": [("short",), ("a text of more tokens than the model reads at once " * 3,)],
        "generate_until": [(text, WRITING["generation_kwargs"]) for text, _ in texts[:3]],
    }
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments[kind])]


def scorer_of(folder: Path) -> tuple[TextScorer, Any]:
    loaded = load_run(folder)
    tokenizer, window = loaded.tokenizer, loaded.settings.data.sequence_length
    return TextScorer(loaded.model, loaded.mesh, window, 3, tokenizer.decode, tokenizer.eos), tokenizer


def test_equal_to_lm_eval_of_the_exported_model(tmp_path: Path, tasks: Path) -> None:
    """Scores, rolling scores, greedy texts and the metrics of tasks are those of lm_eval's model for transformers."""
    pytest.importorskip("accelerate", reason="lm_eval's model for transformers needs accelerate")
    from lm_eval.models.huggingface import HFLM

    from xscale.evaluate.lm_eval_model import lm_eval_model

    folder = trained(tmp_path)
    call("checkpoint", "export", folder, tmp_path / "exported")
    options = {"dtype": "float64", "device": "cpu", "batch_size": 2, "max_length": 32, "add_bos_token": False}
    reference = HFLM(str(tmp_path / "exported"), prefix_token_id=2, **options)
    scorer, tokenizer = scorer_of(folder)
    model = lm_eval_model(scorer, tokenizer, 32)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        result = getattr(model, kind)(instances(kind))
        expected = getattr(reference, kind)(instances(kind))
        if kind == "loglikelihood":
            assert [greedy for _, greedy in result] == [greedy for _, greedy in expected]
            result, expected = ([score for score, _ in scores] for scores in (result, expected))
        assert result == (expected if kind == "generate_until" else pytest.approx(expected, abs=1e-6)), kind


@pytest.mark.long
def test_metrics_of_tasks_are_those_of_the_exported_model(tmp_path: Path, tasks: Path) -> None:
    pytest.importorskip("accelerate", reason="lm_eval's model for transformers needs accelerate")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = trained(tmp_path)
    call("checkpoint", "export", folder, tmp_path / "exported")
    options = {"dtype": "float64", "device": "cpu", "max_length": 32, "add_bos_token": False}
    reference = HFLM(str(tmp_path / "exported"), prefix_token_id=2, **options)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    loaded = manager.load(["choose", "perplexity", "write"])
    expected = lm_eval.evaluate(reference, loaded, log_samples=False)["results"]
    names = "choose,perplexity,write"
    result = printed("eval", folder, "--tasks", names, "--task-folder", tasks)
    again = lm_eval.evaluate(lm_eval_model_of_run(folder), loaded, log_samples=False)["results"]
    assert again["choose"]["acc_norm,none"] == expected["choose"]["acc_norm,none"]
    bits = [values["perplexity"]["bits_per_byte,none"] for values in (again, expected)]
    assert bits[0] == pytest.approx(bits[1], abs=1e-6)
    assert result["step"] == 2
    assert result["tasks"].keys() == expected.keys()
    for task, values in result["tasks"].items():
        assert values
        for name, value in values.items():
            key = name if "," in name else f"{name},none"
            assert value == pytest.approx(expected[task][key], rel=1e-6, abs=1e-6), (task, name)


def literal(model: Any, ids: list[int], count: int) -> tuple[float, bool]:
    """Score the last `count` of ids by a model of transformers, a token at a time, each after all before it."""
    total, greedy = 0.0, True
    for index in range(len(ids) - count, len(ids)):
        logits = model(torch.tensor([ids[:index]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[ids[index]])
        greedy &= int(logits.argmax()) == ids[index]
    return total, greedy


def test_scores_by_a_literal_loop_over_the_exported_model(tmp_path: Path) -> None:
    """Rows of many lengths and contexts that are truncated on their left."""
    transformers: Any = pytest.importorskip("transformers")
    folder = trained(tmp_path)
    call("checkpoint", "export", folder, tmp_path / "exported")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64).eval()
    scorer, tokenizer = scorer_of(folder)
    texts = [("def f(x):", " return x"), ("x", "y"), ("a long context of many words, ", "an end"), ("import", "os")]
    requests = [ScoreRequest(*map(tokenizer.encode, pair)) for pair in texts]
    best = int(reference(torch.tensor([requests[1].context])).logits[0, -1].argmax())
    requests.append(ScoreRequest(requests[1].context, [best]))
    with torch.no_grad():
        for request, score in zip(requests, scorer.score(requests), strict=True):
            ids = [*request.context, *request.continuation]
            expected, greedy = literal(reference, ids[-33:], len(request.continuation))
            assert score.log_likelihood == pytest.approx(expected, abs=1e-6)
            assert score.greedy == greedy
    assert scorer.score(requests)[-1].greedy


def requests_of(tokenizer: Any) -> list[ScoreRequest]:
    """Requests of three lengths, several of which have different texts."""
    pairs = [("def f(x):", " return x"), ("class A():", " pass"), ("import ", "os.path")]
    texts = [(context, continuation * count) for count in (1, 2, 1) for context, continuation in pairs]
    return [ScoreRequest(*map(tokenizer.encode, text)) for text in [*texts, ("a = [1, 2", ", 3, 4, 5")]]


def scored(folder: Path) -> list[float]:
    scorer, tokenizer = scorer_of(folder)
    return [score.log_likelihood for score in scorer.score(requests_of(tokenizer))]


FEW = yaml.safe_load(yaml.safe_dump(MIXTURE).replace("capacity_factor: 1.25", "capacity_factor: 0.5"))
"""A mixture whose experts take half of the tokens of a micro-batch; Hugging Face does not know its attention."""


@pytest.mark.parametrize("model", [pytest.param(MODEL, marks=pytest.mark.long), FEW], ids=["dense", "mixture"])
def test_no_score_depends_on_other_requests_or_ranks(model: Any, tmp_path: Path, pool: Pool) -> None:
    folder = trained(tmp_path, model)
    together = scored(folder)
    scorer, tokenizer = scorer_of(folder)
    single = [scorer.score([request])[0].log_likelihood for request in requests_of(tokenizer)]
    assert together == pytest.approx(single, rel=1e-12)
    for ranks in pool.run(scored, 2, folder):
        assert ranks == pytest.approx(together, rel=1e-12)


def test_a_text_ends_before_the_first_stop(tmp_path: Path) -> None:
    scorer, tokenizer = scorer_of(trained(tmp_path))
    prompt = tokenizer.encode("def ")
    text = scorer.write([TextRequest(prompt, 12, (), 0.0, None, 0)])[0]
    assert len(text) > 3
    stop = text[2:4]
    ended = scorer.write([TextRequest(prompt, 12, (stop, text[3:]), 0.0, None, 0)])[0]
    assert ended == text[: text.index(stop)]
    with pytest.raises(ConfigError, match=r"32 tokens to write leave no room for a prompt in the 32 that it reads"):
        scorer.write([TextRequest(prompt, 32, (), 0.0, None, 0)])


def with_tasks(folder: Path, name: str, tasks: Path, **sections: Any) -> int:
    given = {"names": ["choose"], "every_steps": 2, "folder": str(tasks), "limit": 5}
    train = {"steps": 3, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0, "tasks": given}
    observe = {"report": True, "tensorboard": True}
    settings = recipe(
        folder, name, **{"model": MODEL, "precision": DOUBLE, "train": train, "observe": observe, **sections}
    )
    return run(settings)


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, name) if "tasks/choose/acc" in line]


def test_a_run_evaluates_tasks_and_reports_them(tmp_path: Path, tasks: Path) -> None:
    assert with_tasks(tmp_path, "run", tasks) == EXIT_DONE
    lines = results(tmp_path, "run")
    assert [line["step"] for line in lines] == [2, 3]
    last = printed("eval", tmp_path / "run", "--tasks", "choose", "--task-folder", tasks, "--limit", 5)
    expected = {f"tasks/choose/{name}": value for name, value in last["tasks"]["choose"].items()}
    assert {name: value for name, value in lines[-1].items() if name in expected} == pytest.approx(expected, abs=1e-12)
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<th>choose/acc</th>" in report
    assert "choose/acc_stderr" not in report
    assert f"tasks: choose/acc {lines[-1]['tasks/choose/acc']:.4g}" in (tmp_path / "run" / "log.txt").read_text()


def test_a_task_that_cannot_be_loaded_is_refused_before_the_first_step(tmp_path: Path, tasks: Path) -> None:
    (tasks / "questions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"train\.tasks: lm_eval cannot load the tasks"):
        with_tasks(tmp_path, "run", tasks)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_request_that_cannot_be_answered_ends_no_run(tmp_path: Path, tasks: Path) -> None:
    """The answers are longer than what the model reads."""
    data = tasks / "questions.jsonl"
    data.write_text(data.read_text(encoding="utf-8").replace(" None", " None" * 20), encoding="utf-8")
    assert with_tasks(tmp_path, "run", tasks) == EXIT_DONE
    assert not results(tmp_path, "run")
    text = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert text.count("the tasks are not evaluated: tasks: a continuation of 100 tokens is longer than the 32") == 2


def test_tasks_read_the_weights_that_an_optimizer_averages(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule-free AdamW trains others than it evaluates and saves."""
    weights: dict[int, dict[str, torch.Tensor]] = {}

    def noted(parts: RunParts, step: int, on_forward: Callable[[], None]) -> TaskReport:
        weights[step] = {f"model.{name}": value.detach().clone() for name, value in parts.model.named_parameters()}
        return TaskReport(step, {}, 0.0)

    monkeypatch.setattr(run_work, "report_tasks", noted)
    averaging = {"optimizer": {"kind": "schedule_free_adamw", "lr": 0.01}, "schedule": {"kind": "constant"}}
    assert with_tasks(tmp_path, "run", tasks, **averaging) == EXIT_DONE
    saved = load_tensors(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert weights[3]
    assert all(torch.equal(value, saved[name]) for name, value in weights[3].items())


@pytest.mark.long
def test_tasks_leave_the_training_as_it_is(tmp_path: Path, tasks: Path) -> None:
    assert with_tasks(tmp_path, "run", tasks, model=MIXTURE) == EXIT_DONE
    none = {"steps": 3, "batch_size": 4, "micro_batch_size": 2, "eval_every": 0}
    assert with_tasks(tmp_path, "without", tasks, model=MIXTURE, train=none) == EXIT_DONE
    with_losses, without = (
        [line["loss"] for line in metrics(tmp_path, name) if "loss" in line] for name in ("run", "without")
    )
    assert with_losses == without


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}},
    "cp2": {"mesh": {"cp": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp2" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_score_as_one_process_does(name: str, tmp_path: Path, tasks: Path, pool: Pool) -> None:
    assert with_tasks(tmp_path, "single", tasks) == EXIT_DONE
    assert pool.run(with_tasks, 2, tmp_path, name, tasks, parallel=LAYOUTS[name]) == [EXIT_DONE] * 2
    single, sharded = results(tmp_path, "single"), results(tmp_path, name)
    for first, second in zip(single, sharded, strict=True):
        of_tasks = [key for key in first if key.startswith("tasks/")]
        assert of_tasks
        assert [first[key] for key in of_tasks] == pytest.approx([second[key] for key in of_tasks], abs=1e-9)


@pytest.mark.long
def test_a_failure_of_rank_0_ends_all(tmp_path: Path, tasks: Path, pool: Pool) -> None:
    """Rank 0 alone reads the tasks; the others raise its refusal."""
    folder = trained(tmp_path)
    for message in pool.run(refusal, 2, folder, tasks):
        assert message.startswith("--tasks: lm_eval has no task 'chose'. The nearest are choose")


def refusal(folder: Path, tasks: Path) -> str:
    from xscale.evaluate.lm_eval_model import TaskRequest
    from xscale.evaluate.tasks import tasks_of_run

    with pytest.raises(ConfigError) as caught:
        tasks_of_run(folder, TaskRequest(("chose",), folder=str(tasks)))
    return str(caught.value)


def test_refusals(tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path)
    for words, message in {
        ("--tasks", "choose", "--data", "a.txt"): r"--data: tasks have examples of their own\. Omit it",
        ("--shots", "1"): r"--shots: it is for tasks of lm_eval\. Add --tasks, or omit it",
        ("--tasks", ","): r"--tasks: names no task\. Give such as hellaswag",
        ("--tasks", "choose", "--bleu"): r"--tasks: prints another curve or number than --bleu",
        (
            "--tasks",
            "choose",
            "--task-folder",
            str(tasks / "none"),
        ): r"--tasks: there is no folder .*none\. Give a folder",
    }.items():
        with pytest.raises(ConfigError, match=message):
            call("eval", folder, *words)
    (tasks / "questions.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"--tasks: lm_eval cannot load the tasks: .*Hugging Face Hub"):
        call("eval", folder, "--tasks", "choose", "--task-folder", tasks)
    named = {"tasks": {"names": ["choose"]}}
    encoder = recipe(tmp_path, model={**MODEL, "kind": "encoder"}, objective={"kind": "masked"}, train=named)
    assert [str(problem) for problem in encoder.check() if problem.path == "train.tasks.names"] == [
        "train.tasks.names: the model 'encoder' is not causal: a token sees later ones. Take []."
    ]
    monkeypatch.setattr("xscale.settings.scored_text.find_spec", lambda name: None)
    problems = [problem for problem in recipe(tmp_path, train=named).check() if problem.path == "train.tasks.names"]
    assert [problem.what for problem in problems] == ["tasks are evaluated by lm_eval, which is not installed"]
    with pytest.raises(ConfigError, match=r"--tasks: tasks are evaluated by lm_eval.*pip install 'lm_eval>=0\.4\.13"):
        call("eval", folder, "--tasks", "choose")
