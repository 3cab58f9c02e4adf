"""A student and its teacher in a run: the teacher stays as it is and is not saved, and layouts change nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import Pool
from tests.train.test_finetune import MODEL as LABELS_MODEL
from tests.train.test_finetune import asked as labelled
from tests.train.test_resume import equal
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from xscale.distill.distill import DistilledObjective
from xscale.recipe import Recipe
from xscale.run.run_folder import CHECKPOINTS
from xscale.train.setup import check_machine

TRAIN = {"steps": 4, "batch_size": 8, "micro_batch_size": 2, "eval_every": 4, "eval_sequences": 2, "baseline": False}
DOUBLE = {"compute": "float64", "master": "float64"}
FOUR_DEEP = {"model": {"stack": {"depth": 4}}, "train": {"steps": 2}}
ALL = {
    "temperature": 3.0, "soft_weight": 0.7, "hard_weight": 0.3, "cosine_weight": 0.5, "hidden_weight": 0.2,
    "embedding_weight": 0.4, "attention_weight": 0.1,
}  # fmt: skip
OUTER = {"temperature": 3.0, "cosine_weight": 0.5}


def model(depth: int = 2, **changes: Any) -> dict[str, Any]:
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2}
    block = {"mixer": mixer, "ffn": {"kind": "gated", "hidden": 32}, "dropout": 0.1}
    return {"kind": "decoder", "width": 32, "stack": {"depth": depth, "block": block}, **changes}


def student(folder: Path, name: str, distill: dict[str, Any], **sections: Any) -> int:
    """Train a student; the teacher is of the folder "teacher", and trained first by whoever comes first."""
    given = {"train_teacher": FOUR_DEEP, "teacher": str(folder / "teacher"), **distill}
    data = {"train": TRAIN, "precision": DOUBLE, "model": model(), **sections}
    return run(recipe(folder, name, distill=given, **data))


def last(folder: Path, name: str, step: int = 4) -> Path:
    return folder / name / CHECKPOINTS / f"step-{step:08d}"


@pytest.mark.long
def test_the_teacher_stays_and_is_not_saved(tmp_path: Path, pool: Pool) -> None:
    """Trained first, once; its weights are bit-equal afterwards, and the student's checkpoint has none of them."""
    assert pool.run(student, 1, tmp_path, "run", ALL) == [EXIT_DONE]
    before = load_tensors(last(tmp_path, "teacher", 2))
    assert max(int(name.split(".")[3]) for name in before if name.startswith("model.stack.blocks")) == 3
    assert pool.run(student, 1, tmp_path, "stopped", ALL, train={**TRAIN, "stop_after": 2}) == [EXIT_REQUEUE]
    assert pool.run(student, 1, tmp_path, "stopped", ALL) == [EXIT_DONE]
    equal(tmp_path, "stopped", "run", 4)
    after = load_tensors(last(tmp_path, "teacher", 2))
    assert all(before[name].equal(after[name]) for name in before)
    assert {path.name for path in (tmp_path / "teacher" / CHECKPOINTS).iterdir()} == {"step-00000002"}
    saved = load_tensors(last(tmp_path, "run"))
    assert max(int(name.split(".")[3]) for name in saved if name.startswith("model.stack.blocks")) == 1
    assert not any("teacher" in name for name in saved)
    line = metrics(tmp_path, "run")[0]
    names = {name.removeprefix("distillation/") for name in line if name.startswith("distillation/")}
    assert names == {
        "soft_loss", "cosine_loss", "embedding_loss", "block_0/hidden_loss", "block_1/hidden_loss",
        "block_0/attention_loss", "block_1/attention_loss",
    }  # fmt: skip
    assert all(line[f"distillation/{name}"] > 0 for name in names)
    assert "frozen, tp=1, ZeRO-0" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")


def frozen(folder: Path, name: str, distill: dict[str, Any], **sections: Any) -> bool:
    """Train a student; whether the tensors of its teacher, in memory, are as they were, and have no gradient."""
    build, kept = DistilledObjective.__init__, list[Any]()

    def watched(self: DistilledObjective, objective: Any, teacher: Any, gather: Any = None) -> None:
        build(self, objective, teacher, gather)
        kept.extend((value, value.clone()) for value in teacher.model.parameters())

    DistilledObjective.__init__ = watched  # type: ignore[method-assign]
    try:
        student(folder, name, distill, **sections)
    finally:
        DistilledObjective.__init__ = build  # type: ignore[method-assign]
    return bool(kept) and all(now.equal(before) and now.grad is None for now, before in kept)


def test_the_student_starts_with_blocks_of_the_teacher(tmp_path: Path, pool: Pool) -> None:
    """Sanh et al. 2019: embeddings, head and one block out of two; and the teacher is not trained."""
    distill = {**OUTER, "init_from_teacher": True, "layers": [0, 2]}
    optimizer = {"kind": "adamw", "lr": 0.0}
    assert pool.run(frozen, 1, tmp_path, "run", distill, optimizer=optimizer) == [True]
    ours, theirs = load_tensors(last(tmp_path, "run")), load_tensors(last(tmp_path, "teacher", 2))
    names = [name for name in ours if name.startswith("model.")]
    for name in names:
        taught = name.replace("blocks.1.", "blocks.2.") if "blocks.1." in name else name
        assert ours[name].equal(theirs[taught]), name
    assert len(names) > 10


def test_a_teacher_of_another_width(tmp_path: Path, pool: Pool) -> None:
    """Learned maps are parameters of the student; those of the teacher's width are the teacher's alone."""
    teacher = {"model": {"stack": {"depth": 2}, "width": 48}, "train": {"steps": 1}}
    distill = {"train_teacher": teacher, "hidden_weight": 1.0, "map_width": 48}
    assert pool.run(student, 1, tmp_path, "run", distill, train={**TRAIN, "steps": 2}) == [EXIT_DONE]
    saved = load_tensors(last(tmp_path, "run", 2))
    assert tuple(saved["model.distillation.hidden.weight"].shape) == (48, 32)


@pytest.mark.long
def test_without_a_teacher_it_is_another_run(tmp_path: Path, pool: Pool) -> None:
    """The control: each weight changes the gradients."""
    pool.run(student, 1, tmp_path, "none", {"soft_weight": 0.0, "hard_weight": 1.0})
    for key in ALL.keys() - {"temperature", "hard_weight"}:
        pool.run(student, 1, tmp_path, key, {"soft_weight": 0.0, "hard_weight": 1.0, key: 0.5})
        ours, theirs = (losses(tmp_path, name) for name in (key, "none"))
        assert ours[0] == theirs[0], "the value of the first step is that of the objective"
        assert ours[-1] != theirs[-1], key


TASK = {
    "temperature": 1.0, "soft_weight": 1.0, "hard_weight": 0.0, "embedding_weight": 1.0, "hidden_weight": 1.0,
    "attention_weight": 1.0, "map_width": 32, "inner_until": 0.5,
}  # fmt: skip


def task_recipe(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    """The task stage of TinyBERT: a narrower student of a classifier, which is trained first."""
    teacher = {"model": {"width": 32, "stack": {"depth": 2}}, "train": {"steps": 3}}
    distill = {**TASK, "teacher": str(folder / "teacher"), "train_teacher": teacher, **sections.pop("distill", {})}
    narrow = {**LABELS_MODEL, "width": 16, "stack": {**LABELS_MODEL["stack"], "depth": 1}}
    given = {"model": narrow, "distill": distill, "train": TRAIN, "precision": DOUBLE, **sections}
    return labelled(folder, name, **given)


def task_student(folder: Path, name: str, **sections: Any) -> int:
    return run(task_recipe(folder, name, **sections))


def test_a_student_of_a_classifier(tmp_path: Path, pool: Pool) -> None:
    """Jiao et al. 2020: on labelled examples, first inner states and then the teacher's predictions of classes."""
    assert pool.run(task_student, 1, tmp_path, "run") == [EXIT_DONE]
    lines = [line for line in metrics(tmp_path, "run") if "loss" in line]
    names = {name.removeprefix("distillation/") for name in lines[0] if name.startswith("distillation/")}
    assert names == {"soft_loss", "embedding_loss", "block_0/hidden_loss", "block_0/attention_loss"}
    # Until half of the steps the head is not trained, which only the predictions reach.
    assert pool.run(task_student, 1, tmp_path, "half", train={**TRAIN, "stop_after": 2}) == [EXIT_REQUEUE]
    half, end = (load_tensors(last(tmp_path, name, step)) for name, step in (("half", 2), ("run", 4)))
    assert "eval_accuracy" in metrics(tmp_path, "run")[-1]
    assert not half["model.head.classes.bias"].any()
    assert end["model.head.classes.bias"].any()
    settings = task_recipe(tmp_path, "other", distill={"train_teacher": None})
    assert check_machine(settings, ["data"]) == []
    two = task_recipe(tmp_path, "other", distill={"train_teacher": None}, objective={"classes": 2})
    (problem,) = check_machine(two, ["data"])
    assert (problem.path, problem.what) == (
        "distill.teacher",
        "the teacher predicts 3 classes, and the student 2 classes",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel",
    [{}, {"mesh": {"tp": 2}}, {"zero": {"stage": 3}}, {"mesh": {"cp": 2}}],
    ids=["dp2", "tp2", "zero3", "cp2"],
)
def test_layouts_learn_classes_as_one_process_does(tmp_path: Path, pool: Pool, parallel: dict[str, Any]) -> None:
    assert pool.run(task_student, 1, tmp_path, "single") == [EXIT_DONE]
    assert pool.run(task_student, 2, tmp_path, "parts", parallel=parallel) == [EXIT_DONE] * 2
    ours, theirs = (load_tensors(last(tmp_path, name)) for name in ("parts", "single"))
    for key, value in theirs.items():
        assert (ours[key] - value).abs().max() < 1e-9, key


def problems(folder: Path, distill: dict[str, Any], world: int = 1, **sections: Any) -> list[str]:
    given = {"teacher": "nowhere", **distill}
    found = recipe(folder, **{"model": model(), "distill": given, **sections}).check(world)
    return [f"{problem.path}: {problem.what}" for problem in found]


REFUSED: list[tuple[dict[str, Any], int, dict[str, Any], str]] = [
    ({"teacher": None}, 1, {}, "distill.teacher: there is no teacher"),
    ({"soft_weight": 0, "hard_weight": 0}, 1, {}, "distill: all weights are 0"),
    ({"inner_until": 0.5}, 1, {}, "distill.inner_until: one of the two stages would train nothing"),
    ({"map_width": 8}, 1, {}, "distill.map_width: the maps are for"),
    (
        {"tp": 5, "zero": 3},
        15,
        {"parallel": {"mesh": {"tp": 3}}},
        "distill.tp: ranks of a teacher with tp=5 and ZeRO-3 would run it on different numbers of micro-batches",
    ),
    ({"tp": 2}, 1, {}, "distill.tp: a teacher with tp=2 needs a multiple of 2 ranks, and there are 1"),
    (
        {"tp": 2},
        2,
        {"parallel": {"mesh": {"pp": 2}}},
        "distill.tp: a teacher with tp=2 needs a multiple of 2 ranks, and a stage has 1",
    ),
    (
        {"zero": 3},
        4,
        {"parallel": {"mesh": {"pp": 2, "order": ["dp_replicate", "dp_shard", "cp", "tp", "pp"]}}},
        "parallel.mesh.order: a group of the teacher would have ranks of several pipeline stages",
    ),
    (
        {"hidden_weight": 1.0, "map_width": 32},
        2,
        {"parallel": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}, "model": model(4)},
        "parallel.pipeline.schedule: 'zbv' puts two copies of distillation.hidden.weight on one rank",
    ),
    ({"cosine_weight": 1.0}, 1, {"objective": {"kind": "denoising"}}, "distill: states and logits of all tokens"),
    ({"soft_over": "all"}, 1, {"objective": {"kind": "denoising"}}, "distill: states and logits of all tokens"),
    (
        {"soft_over": "all"},
        1,
        {"objective": {"kind": "classify"}},
        "distill.soft_over: objective 'classify' predicts at its targets alone",
    ),
    (
        {"attention_weight": 1.0},
        3,
        {
            "parallel": {"mesh": {"cp": 3}, "context": {"gather": True}},
            "model": {
                **model(),
                "stack": {"depth": 1, "block": {"mixer": {"kind": "attention", "heads": 4, "dropout": 0.1}}},
            },
        },
        "parallel.context.gather: attention on the gathered sequence hands on no scores",
    ),
    ({"train_teacher": {"train": {"batch_size": 7}}}, 1, {}, "distill.train_teacher.train.batch_size: "),
    ({"train_teacher": {"trian": {}}}, 1, {}, "distill.train_teacher.trian: "),
]


@pytest.mark.parametrize(("distill", "world", "sections", "sentence"), REFUSED, ids=[case[3][:30] for case in REFUSED])
def test_it_is_refused_before_the_start(
    tmp_path: Path, distill: dict[str, Any], world: int, sections: dict[str, Any], sentence: str
) -> None:
    found = problems(tmp_path, distill, world, **sections)
    assert any(problem.startswith(sentence) for problem in found), found


def test_a_block_without_scores_is_refused(tmp_path: Path) -> None:
    linear = model()
    linear["stack"] = {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 4, "core": {"kind": "linear"}}}}
    assert problems(tmp_path, {"attention_weight": 1.0}, model=linear) == [
        "distill.attention_weight: the student has blocks without one attention of core softmax, whose scores could be "
        "compared"
    ]
    assert problems(tmp_path, {"hidden_weight": 1.0}, model=linear) == []


def written_run(folder: Path, **sections: Any) -> str:
    """A run of a teacher, with a checkpoint that has its config and no weights."""
    from xscale.run.init_run import create_run
    from xscale.settings.settings import build_on_meta

    settings = recipe(folder, "teacher", **{"model": model(4), **sections})
    from xscale.nn.materialize import materialize

    network = build_on_meta(settings, 64)
    materialize(network, 0)
    create_run(settings, network, folder / "teacher")
    return str(folder / "teacher")


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def refused(distill: dict[str, Any], **sections: Any) -> str:
        given = {"teacher": str(tmp_path / "teacher"), **distill}
        found = check_machine(recipe(tmp_path, **{"model": model(), "distill": given, **sections}), ["data"])
        return "; ".join(f"{problem.path}: {problem.what}" for problem in found)

    assert "teacher is no run with a checkpoint and no folder of Hugging Face" in refused({})
    written_run(tmp_path)
    assert refused({}) == ""
    assert refused({"hidden_weight": 1.0}, model=model(3)).startswith("distill.layers: the 3 blocks of the student do")
    assert refused({"hidden_weight": 1.0, "layers": [1, 4]}).startswith("distill.layers: ")
    assert "states of width 16 are compared with the teacher's of width 32" in refused(
        {"hidden_weight": 1.0}, model=model(width=16)
    )
    assert "the outputs have the widths 16 and 32" in refused({"cosine_weight": 1.0}, model=model(width=16))
    assert "has the shape" in refused({"init_from_teacher": True}, model=model(width=16))
    assert "the teacher reads at most 32 tokens" in refused({}, data={"sequence_length": 64})
    narrow = model()
    narrow["stack"]["block"]["mixer"] = {"kind": "attention", "heads": 2}
    assert "scores of 2 heads are compared with the teacher's of 4" in refused({"attention_weight": 1.0}, model=narrow)
    encoder = {"model": {**model(), "kind": "encoder"}, "objective": {"kind": "masked"}}
    assert "the teacher is of kind 'decoder', and the student of kind 'encoder'" in refused({}, **encoder)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """A Hugging Face folder counts its tokens; a run has a fingerprint of its tokenizer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    teacher.save_pretrained(tmp_path / "hf")
    one = recipe(tmp_path, model=model(), train=TRAIN, distill={"teacher": str(tmp_path / "hf")})
    assert one.check() == []
    with pytest.raises(ConfigError, match="the teacher has a vocabulary of 64 tokens, and the run's tokenizer"):
        run(one)


@pytest.mark.long
def test_a_hugging_face_teacher(tmp_path: Path, pool: Pool) -> None:
    """Its layout changes nothing either."""
    transformers = pytest.importorskip("transformers")
    from xscale.data.tokenizer.tokenizer import TOKENIZERS

    vocabulary = TOKENIZERS.build(recipe(tmp_path).data.tokenizer, tmp_path).vocabulary
    sizes = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "hf")
    distill = {"teacher": str(tmp_path / "hf"), "train_teacher": None, **ALL}
    assert pool.run(student, 1, tmp_path, "single", distill) == [EXIT_DONE]
    for name, parallel, own in (("tp2", {"mesh": {"tp": 2}}, {}), ("dp2", {}, {"zero": 3})):
        assert pool.run(student, 2, tmp_path, name, {**distill, **own}, parallel=parallel) == [EXIT_DONE] * 2
        for ours, theirs in zip(losses(tmp_path, name), losses(tmp_path, "single"), strict=True):
            assert math.isclose(ours, theirs, rel_tol=1e-9)


def test_the_section_is_data(tmp_path: Path) -> None:
    one = recipe(tmp_path, model=model(), distill={"train_teacher": FOUR_DEEP, **ALL})
    assert json.loads(json.dumps(encode(one)))["distill"]["train_teacher"] == FOUR_DEEP
