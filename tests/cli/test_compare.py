import json
import shlex

import pytest

from realm_jax.cli import compare as command
from realm_jax.cli.main import main


def write_predictions(path, right):
    lines = [
        {
            "id": str(i),
            "question": f"Question {i}?",
            "answers": ["yes"],
            "prediction": "yes",
            "correct": i < right,
        }
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_two_files_of_predictions_are_compared_in_one_command(tmp_path, capsys):
    first = write_predictions(tmp_path / "a.jsonl", 3)
    second = write_predictions(tmp_path / "b.jsonl", 6)
    output = str(tmp_path / "out")
    assert main(["compare", first, second, f"--output={output}"]) == 0
    said, place = capsys.readouterr().out.splitlines()
    assert said.startswith(
        "After fine-tuning, exact match: 30.0% and 60.0%, +30.0 points (95% interval "
    )
    assert place == f"the comparison is in {output}/compare.html"
    assert (tmp_path / "out" / "compare.html").exists()


def test_what_is_not_there_is_bad_input(tmp_path, capsys):
    words = [str(tmp_path / "a"), str(tmp_path / "b"), f"--output={tmp_path}/out"]
    assert main(["compare", *words]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "a") in said
    assert not (tmp_path / "out").exists()


def test_help_fits_the_screen_and_its_examples_parse(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: realm compare")
    assert max(map(len, said.splitlines())) <= 80
    examples = said.split("\nExample:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) == 2
    for line in examples:
        words = shlex.split(line)
        assert words[:2] == ["realm", "compare"]
        command._parser().parse_args(words[2:])
