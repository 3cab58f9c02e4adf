"""Modules that moved are found by their old names, as plugins and scripts import them."""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings

import pytest

from xscale.core.moved_modules import MOVED_NAMES, MOVES, MovedModules, MovedNames

OLD = sorted(MovedModules().moved)
BELOW_OLD = tuple(f"{old}." for old in OLD)


@pytest.fixture(autouse=True)
def forget() -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith(BELOW_OLD)]:
        del sys.modules[name]


@pytest.mark.parametrize("old", OLD)
def test_the_new_place_exists(old: str) -> None:
    new = MovedModules().new_name(old)
    assert new is not None
    assert importlib.util.find_spec(new) is not None, new
    package = importlib.import_module(old.rpartition(".")[0])
    assert importlib.machinery.PathFinder.find_spec(old, package.__path__) is None, f"there is a {old} again"


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("xscale.train.tasks", "xscale.evaluate.tasks", "lm_eval_model_of_run"),
        ("xscale.train.generate", "xscale.generate.generate", "encode_prompt"),
        ("xscale.nn.moe.router.router", "xscale.nn.ffn.moe.router.router", "Router"),
        ("xscale.data.prepare", "xscale.data.corpus.prepare", "prepare"),
    ],
)
def test_an_old_name_works_and_says_the_new_one(old: str, new: str, name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)
    assert [str(one.message) for one in caught if f"{old} is now" in str(one.message)] == [
        f"{old} is now {new}; the old name will be refused in the next version"
    ]


def test_the_base_class_of_norms_is_where_it_was() -> None:
    package = importlib.import_module("xscale.nn.norm")
    assert package.Norm is importlib.import_module("xscale.nn.norm.norm").Norm


def test_an_unknown_name_is_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'xscale\.train\.nothing'"):
        importlib.import_module("xscale.train.nothing")


def test_no_module_moved_twice() -> None:
    assert len(OLD) == sum(len(names.split()) for _, _, names in MOVES)


NAMES = [(old, new, name) for old, new, names in MOVED_NAMES for name in names.split()]


@pytest.mark.parametrize(("old", "new"), sorted({(old, new) for old, new, _ in NAMES}))
def test_old_names_of_classes_and_functions_work(old: str, new: str) -> None:
    moved = importlib.import_module(new)
    module = importlib.import_module(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for name in [name for where, _, name in NAMES if where == old]:
            assert getattr(module, name).__module__ != old, f"{old} has {name} again"
        assert all(hasattr(moved, name) for where, to, name in NAMES if (where, to) == (old, new))


def test_an_old_name_of_a_class_says_the_new_one_where_it_is_imported() -> None:
    with pytest.warns(FutureWarning, match="is now") as caught:
        from xscale.nn.norm.norm import BatchNorm  # type: ignore[attr-defined]

    from xscale.nn.norm.batch_statistics import BatchNorm as Moved

    assert BatchNorm is Moved
    assert [(str(one.message), one.filename) for one in caught] == [
        (
            "xscale.nn.norm.norm.BatchNorm is now xscale.nn.norm.batch_statistics.BatchNorm; "
            "the old name will be refused in the next version",
            __file__,
        )
    ]


def test_a_module_that_is_loaded_already_gets_its_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("xscale.core.yaml_reader")
    monkeypatch.delattr(module, "__getattr__")
    assert not hasattr(module, "flow_text")
    MovedNames()
    with pytest.warns(FutureWarning, match=r"xscale\.core\.yaml_writer\.flow_text"):
        assert callable(module.flow_text)


def test_a_name_that_never_was_is_refused_as_by_python() -> None:
    with pytest.raises(ImportError, match=r"cannot import name .Nothing."):
        from xscale.nn.norm.norm import Nothing  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match=r"has no attribute .Nothing."):
        importlib.import_module("xscale.nn.norm.norm").Nothing  # noqa: B018
