"""Texts and encoders to begin a chain with, and what gin files say."""

import string

from realm_jax.cli import configuration
from realm_jax.data.wordpiece import SPECIAL_PIECES
from realm_jax.stages import STAGES
from tests.json_lines import write_lines
from tests.tiny_encoder import write_bert
from tpu_launch import local
from tpu_launch.chain import ChainCommands


def write_articles(texts):
    articles = [{"title": f"t{i}", "text": text} for i, text in enumerate(texts)]
    write_lines("articles.jsonl", articles)


def write_encoder(folder, characters, words=()):
    """Writes a BERT of random weights that knows characters, inner ones, and words."""
    inner = [f"##{character}" for character in characters]
    write_bert(
        folder, [*SPECIAL_PIECES, *string.punctuation, *characters, *inner, *words]
    )


def configuration_of(command, files, bindings):
    """Returns the configuration that a command would run with."""
    parser = configuration.make_parser(f"realm {command}", "")
    arguments = [f"--gin_file={file}" for file in files]
    arguments += [f"--gin.{binding}" for binding in bindings]
    configuration.parse(parser, arguments, command)
    return configuration.configured(STAGES[command].load_config())


def stages_of(chain):
    """Yields each stage of a chain file, its command line and its configuration."""
    parser = configuration.make_parser("chain", "")
    configuration.parse_chain(parser, [f"--gin_file={chain}"])
    commands = ChainCommands(configuration.configured(local.Chain), [str(chain)])
    for stage in commands.stages:
        arguments = commands.main(stage)
        configuration.parse(parser, arguments[1:], stage.command)
        config = configuration.configured(STAGES[stage.command].load_config())
        yield stage, arguments, config


def configs_of(chain):
    """Returns the configuration of each stage of a chain file, by command."""
    return {stage.command: config for stage, _, config in stages_of(chain)}
