"""Published models, a chain to begin with, and commands that must refuse."""

import pytest

from realm_jax.cli.main import main
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import restore_params
from tests import tiny_run
from tests.seqio_fixtures import registry
from tests.weights.published_models import unpacked

__all__ = ["registry"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of small models that were published; read only."""
    return unpacked(tmp_path_factory.mktemp("published"))


@pytest.fixture
def import_weights():
    """Imports published models; returns the parameters that a stage starts from."""

    def run(*words):
        assert main(["import-weights", *map(str, words)]) == 0
        dest = [word for word in words if not str(word).startswith("--")][-1]
        return restore_params(open_store(dest)).tree

    return run


@pytest.fixture
def inputs(tmp_path):
    """A folder with the text and the questions of a chain."""
    tiny_run.make_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def realm(capsys):
    """Runs a command that must end well; returns what it printed."""

    def run(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refuse(capsys):
    """Runs a command that must refuse; returns its one line."""

    def run(arguments, *words):
        capsys.readouterr()
        assert main([str(word) for word in arguments]) == 2, arguments
        line = only_line(capsys.readouterr().err)
        for word in words:
            assert str(word) in line
        return line

    return run


def only_line(said: str) -> str:
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    # What was expected, what arrived, what to do: more than a word.
    assert len(lines[0].split()) > 5
    return lines[0]
