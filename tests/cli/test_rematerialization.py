"""remat="auto" is a word of gin files: it is decided before a model is made."""

import pytest

from realm_jax.cli import configuration, rematerialization
from realm_jax.cli.main import main
from tests import tiny_run

AUTO = '--gin.bert.BertConfig.remat="auto"'


def line(command, root):
    files = (f"runs/{command.replace('-', '_')}", "models/tiny")
    return [
        command,
        *(f"--gin_file={tiny_run.GIN / file}.gin" for file in files),
        *(f"--gin.{binding}" for binding in tiny_run.bindings(command, root)),
    ]


@pytest.mark.parametrize(
    "command", ["warm-start", "pretrain", "finetune", "evaluate", "ask"]
)
def test_a_command_that_makes_models_names_the_planner(command, tmp_path, capsys):
    """There is no corpus: what is undecided is said before anything is opened."""
    assert main([*line(command, tmp_path), AUTO]) == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert said == (
        'error: expected a decision for remat="auto", got none; have one made by '
        "`python -m tpu_launch plan ... --write=plan.gin` and add --gin_file=plan.gin, "
        "or set bert.BertConfig.remat to none, attention, dots or full"
    )


@pytest.mark.parametrize(
    ("text", "undecided"),
    [
        ('bert.BertConfig.remat = "auto"', True),
        ('bert.BertConfig.remat = %REMAT\nREMAT = "auto"', True),
        ('bert.BertConfig.remat = "auto"\nbert.BertConfig.remat = "dots"', False),
        ('bert.BertConfig.products = "auto"', False),
        ("", False),
    ],
)
def test_what_is_undecided(text, undecided, tmp_path):
    begin = (
        "from __gin__ import dynamic_registration\nfrom realm_jax.models import bert\n"
    )
    file = tmp_path / "mine.gin"
    file.write_text(begin + text)
    parser = configuration.make_parser("", "")
    configuration.parse(parser, [f"--gin_file={file}"])
    assert rematerialization.is_undecided() == undecided
