"""Preparing a corpus with Beam: the same bytes however it is done."""

import dataclasses
import signal
import sys

import pytest

from realm_jax.cli.main import main
from realm_jax.prepare import prepare
from realm_jax.prepare.scratch import Workers
from realm_jax.storage import open_store
from tests import tiny_run
from tests.prepare.folders import contents
from tests.refused import refused
from tests.waiting import wait_until

PREPARE = "prepare.PrepareConfig"


def run_here(root, corpus, *flags, **macros):
    """Returns the code of the same in this process: TensorFlow is imported once."""
    arguments = tiny_run.arguments("prepare", root, CORPUS=str(corpus), **macros)
    return main([*arguments, *flags])


@pytest.fixture
def inputs(finished, tmp_path):
    return tiny_run.copy(finished, tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("registry")
def test_the_bytes_do_not_depend_on_workers_parts_or_where_they_lie(
    finished, inputs, bucket, capfd
):
    """Two processes that share no disk, only a bucket, as on several machines."""
    shared = f"{bucket}/towns"
    given = ["articles.jsonl", "questions.jsonl"]
    for name in given:
        open_store(shared).write(name, (inputs / name).read_bytes())
    code = run_here(
        inputs,
        inputs / "two",
        "--workers=2",
        f"--gin.{PREPARE}.part_bytes=5000",
        SOURCE=f"{shared}/articles.jsonl",
        QUESTIONS=f"{shared}/questions.jsonl",
        SCRATCH=f"{shared}/scratch",
    )
    said = "".join(capfd.readouterr())
    assert code == 0, said
    assert open_store(shared).list() == given
    assert contents(inputs / "two") == contents(finished / "corpus")
    assert not list(inputs.glob("*.parts"))
    assert "INFO" not in said
    assert "Traceback" not in said


@pytest.mark.full
@pytest.mark.usefixtures("registry")
def test_a_run_keeps_others_out_until_it_is_killed(finished, inputs, capfd):
    parts = inputs / "three.parts"
    arguments = tiny_run.arguments("prepare", inputs, CORPUS=str(inputs / "three"))
    arguments += ["--workers=1", f"--gin.{PREPARE}.part_bytes=2000"]
    process = tiny_run.start(["realm_jax.cli.main", *arguments])
    wait_until(lambda: process.poll() is not None or list(parts.glob("*/done/*")))
    assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    assert main(arguments) == 2
    assert "but one is at work" in capfd.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (inputs / "three" / "corpus.json").exists()
    assert main(arguments) == 0
    # What another one had begun is gone on with, to the same bytes.
    assert contents(inputs / "three") == contents(finished / "corpus")
    assert not (inputs / "three.lock").exists()


def test_an_unknown_flag_is_named_before_anything_is_written(inputs, capsys):
    assert run_here(inputs, inputs / "none", "--wrokers=2") == 2
    assert "--wrokers=2" in capsys.readouterr().err
    assert not (inputs / "none").exists()


def test_numbers_of_workers_and_bad_lines_below_0_are_refused():
    for setting, flag in (("count", "workers"), ("max_bad_lines", "max_bad_lines")):
        with refused(f"of at least 0, got -1; correct --{flag}$"):
            Workers(**{setting: -1})


def test_only_the_examples_that_are_asked_for_are_made_and_more_are_added(
    finished, inputs, monkeypatch
):
    # NumPy alone makes them, and they are too few for other processes, Beam's.
    for unneeded in ("seqio_tasks", "beam_parts"):
        monkeypatch.setitem(sys.modules, f"realm_jax.prepare.{unneeded}", None)
    corpus = inputs / "some"
    assert run_here(inputs, corpus, '--gin.EXAMPLES=["salient"]') == 0
    made = contents(corpus / "examples")
    assert {name.split("/")[0] for name in made} == {"towns_salient"}
    times = {name: (corpus / "examples" / name).stat().st_mtime_ns for name in made}
    more = '--gin.EXAMPLES=["questions", "towns_ict"]'
    assert run_here(inputs, corpus, more) == 0
    assert contents(corpus) == contents(finished / "corpus")
    for name, written in times.items():
        assert (corpus / "examples" / name).stat().st_mtime_ns == written


def test_examples_that_there_are_not_are_refused_before_any_work(tmp_path):
    config = prepare.PrepareConfig(str(tmp_path / "c"), "nothing.jsonl", "towns")
    for examples, others, line in [
        (["salient", "isaliet"], {}, "of ict, salient, terms, .*got 'isaliet'"),
        (["questions"], {}, "of ict, salient, terms, .*got 'questions'.*QUESTIONS"),
        (["ict"], {"knowledge": "k"}, "out of salient, terms, .*got 'ict'"),
        ("salient", {}, "examples to be a tuple of texts, .*got 'salient'"),
        ([], {"more_tasks": "years"}, "more_tasks to be a tuple .*got 'years'"),
    ]:
        with refused(line):
            changed = dataclasses.replace(config, examples=examples, **others)
            prepare.run(changed, lambda *_: None)
    assert not (tmp_path / "c").exists()
