"""`realm tasks`: what it prints, and how it refuses."""

import json
import os
import sys

import pytest

from realm_jax.cli.main import main
from realm_jax.prepare import inspect

BOLD = "\x1b[1;33m"


@pytest.fixture
def corpus(finished):
    return finished / "corpus"


@pytest.fixture(autouse=True)
def _nothing_stays(registry, monkeypatch):
    """Forgets after the test what it registers, imports and sets."""
    modules = set(sys.modules)
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "3"))
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def realm(corpus, capsys):
    """Runs `realm tasks` on a corpus of towns; returns what it printed."""

    def run(*arguments, registered=True):
        capsys.readouterr()
        given = [f"--corpus={corpus}", "--name=towns"] if registered else []
        code = main(["tasks", *given, *arguments])
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return run


def module_in(folder, name, corpus):
    (folder / f"{name}.py").write_text(
        "from tasks import corpora\n"
        f"corpora.register({name[3:]!r}, {str(corpus)!r}, query_length=32)\n"
    )


def test_lists_all_tasks_in_columns(realm):
    lines = realm().splitlines()
    rows = [tuple(line.split(maxsplit=2)) for line in lines]
    assert rows == [(row.task, row.split, row.content) for row in inspect.summaries()]
    kinds = ("blocks", "ict", "random_spans", "random_tokens", "salient", "terms")
    assert {task for task, _, _ in rows} == {f"towns_{kind}" for kind in kinds}
    assert len({line.index(row[2]) for line, row in zip(lines, rows, strict=True)}) == 1


def test_shows_examples(realm):
    shown = realm("towns_salient", "--show=3")
    examples = inspect.show("towns_salient", "train", 3)
    assert shown == "\n\n".join("\n".join(lines) for lines in examples) + "\n"
    # Fewer than asked for is all there are.
    words = ("towns_blocks", "--show=500", "--split=validation")
    assert 0 < len(realm(*words, registered=False).split("\n\n")) < 60


def test_colour_is_for_terminals_only(realm, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert f"{BOLD}[MASK]\x1b[0m" in realm("towns_salient", "--show=1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert BOLD not in realm("towns_salient", "--show=1", registered=False)


def test_questions_are_registered_with_the_corpus_and_one_task_may_be_named(
    realm, tmp_path
):
    path = tmp_path / "questions.jsonl"
    record = {"id": "1", "question": "Town 3", "answers": ["1203"], "split": "train"}
    path.write_text(json.dumps(record))
    shown = realm(f"--questions={path}", "towns_questions", "--show=1")
    assert shown.splitlines() == ["question  town 3", "answers   [1203]"]
    listed = realm("towns_ict", registered=False).splitlines()
    assert {line.split()[0] for line in listed} == {"towns_ict"}


def test_modules_in_the_working_directory_register_their_own(
    realm, corpus, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    module_in(tmp_path, "my_first", corpus)
    module_in(tmp_path, "my_second", corpus)
    words = ("--import_module=my_first", "--import_module=my_second")
    listed = realm(*words, registered=False).splitlines()
    assert {line.split("_")[0] for line in listed} == {"first", "second"}


def test_bad_input_is_one_line_and_code_2(realm, refuse):
    for arguments, *words in (
        (["--name=more"], "--corpus and --name together", "add --corpus"),
        (["--corpus=here"], "together", "add --name"),
        (["--questions=q.jsonl"], "--questions with the --corpus"),
        (["--show=0", "x"], "at least 1", "got 0"),
        (["--show=two", "x"], "--show", "'two'", "realm tasks --help"),
        (["--show=3"], "name of a task"),
        (["--split=train"], "--split with --show"),
        (["--shwo=3"], "--shwo=3"),
        (["--import_module=my_missing"], "my_missing"),
        (["--import_module=./my_tasks.py"], "'./my_tasks.py'", "the name of a module"),
        (["--import_module="], "got ''", "the name of a module"),
        (["--corpus=/nowhere", "--name=x"], "/nowhere", "realm prepare"),
        (["nothing"], "registered", "'nothing'"),
        (["nothing", "--show=1"], "registered", "'nothing'"),
        ([], "none is registered", "--import_module"),
    ):
        refuse(["tasks", *arguments], *words)
    realm()
    unknown = ["tasks", "towns_ict", "--show=1", "--split=test"]
    refuse(unknown, "train, validation), got 'test'")
