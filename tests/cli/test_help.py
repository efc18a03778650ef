"""What a person reads who asks for help."""

import ast
import dataclasses
import os
import re
import shlex
import sys

import pytest

from realm_jax.cli import compare, reach, tasks
from realm_jax.cli.main import main
from realm_jax.stages import STAGES
from tests import tiny_run


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_realm_help_lists_the_commands_in_their_order(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"\n  {name} ") for name in STAGES]
    assert places == sorted(places)
    assert all(spec.purpose in said for spec in STAGES.values())
    assert main([]) == 2


@pytest.mark.parametrize("command", [c for c, spec in STAGES.items() if spec.config])
def test_help_describes_each_setting_and_has_an_example_of_the_run_file(
    command, capsys, tmp_path, monkeypatch
):
    # Where a chain has run, and `python -m` has its folder on the path.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runs").mkdir()
    said = help_of(command, capsys)
    assert said.startswith(f"usage: realm {command}")
    settings = re.search(r"\nSettings, [^\n]*:\n(.*?)\n\n", said, re.DOTALL)
    example = re.search(r"\nExample:\n(.*?)\n\n", said, re.DOTALL)
    assert settings
    assert example
    # A name and its value, and below them what it means.
    listed = re.findall(
        r"^  ([A-Z0-9_]+)(?: = (.+)| \(required\))\n      (\S.+)",
        settings[1],
        re.MULTILINE,
    )
    values = {name: value for name, value, _ in listed}
    assert len(re.findall(r"^  \S", settings[1], re.MULTILINE)) == len(listed)
    run_file = (tiny_run.GIN / "runs" / f"{command.replace('-', '_')}.gin").read_text()
    defined = dict(re.findall(r"^([A-Z0-9_]+) = (.+)", run_file, re.MULTILINE))
    required = {name for name, value in defined.items() if value == "%gin.REQUIRED"}
    assert {name for name, value in values.items() if not value} == required
    for name in defined.keys() - required:
        assert ast.literal_eval(values[name]) == ast.literal_eval(defined[name])
    # What has no name in the run file is a field of the configuration.
    defaults = {
        field.name.upper(): field.default
        for config in STAGES[command].configs
        for field in dataclasses.fields(reach.class_of(config))
    }
    for name in values.keys() - defined.keys():
        assert ast.literal_eval(values[name]) == defaults[name]
    words = shlex.split(example[1].replace("\\\n", " "))
    assert words[:2] == ["realm", command]
    given = {word.removeprefix("--gin.").partition("=")[0] for word in words[2:]}
    assert required <= given <= {*defined, "--gin_file"}
    for word in words[2:]:
        if word.startswith("--gin_file="):
            assert (tiny_run.ROOT / word.partition("=")[2]).exists()
    assert max(map(len, said.splitlines())) <= 88


def test_help_fits_the_screen_and_its_examples_parse(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command, parser, count in (("compare", compare._parser(), 2),
                                   ("tasks", tasks._parser(), 3)):  # fmt: skip
        said = help_of(command, capsys)
        assert said.startswith(f"usage: realm {command}")
        assert max(map(len, said.splitlines())) <= 80
        examples = said.split("\nExample:\n")[1].split("\n\n")[0].splitlines()
        assert len(examples) == count
        for line in examples:
            words = shlex.split(line)
            assert words[:2] == ["realm", command]
            flags = parser.parse_args(words[2:])
            if command == "tasks":
                tasks._check(flags)


def test_a_reader_that_closes_the_pipe_is_no_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        # As of a program that SIGPIPE ends.
        assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""
