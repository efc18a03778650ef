"""What a person reads who asks for help."""

import os
import re
import shlex
import sys

import pytest

from realm_jax.cli import compare, tasks
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


def test_help_has_purpose_macros_and_an_example_that_fits_the_run_file(capsys):
    for command, spec in STAGES.items():
        if spec.config:
            require_help_of_the_run_file(command, help_of(command, capsys))


def require_help_of_the_run_file(command, said):
    assert said.startswith(f"usage: realm {command}")
    macros = re.search(r"\nMacros:\n(.*?)\n\n", said, re.DOTALL)
    example = re.search(r"\nExample:\n(.*?)\n\n", said, re.DOTALL)
    assert macros
    assert example
    run_file = (tiny_run.GIN / "runs" / f"{command.replace('-', '_')}.gin").read_text()
    defined = set(re.findall(r"^([A-Z_]+) =", run_file, re.MULTILINE))
    required = set(re.findall(r"^([A-Z_]+) = %gin.REQUIRED", run_file, re.MULTILINE))
    # The names stand in the first column, before two spaces.
    columns = [line.strip().split("  ")[0] for line in macros[1].splitlines()]
    listed = {
        name for names in columns for name in re.findall(r"\b[A-Z_]{4,}\b", names)
    }
    assert listed <= defined
    assert required <= listed
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
