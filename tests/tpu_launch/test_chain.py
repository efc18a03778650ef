"""Settings given to a whole chain reach the stages that read them, or are refused."""

import pytest

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError
from tests import tiny_run
from tpu_launch import local
from tpu_launch.chain import ChainCommands

QUICKSTART = str(tiny_run.GIN / "runs" / "quickstart.gin")


def commands(*bindings):
    """What the stages of the quickstart are given beside its own settings."""
    given = [f"--gin.{binding}" for binding in bindings]
    parser = configuration.make_parser("test", "")
    configuration.parse_chain(parser, [f"--gin_file={QUICKSTART}", *given])
    chain = configuration.configured(local.Chain)
    return ChainCommands(chain, [QUICKSTART], given)


@pytest.mark.parametrize(
    ("binding", "readers"),
    [
        ("BATCH_SIZE=8", {"warm-start", "pretrain", "finetune"}),
        ("pretrain/BATCH_SIZE=8", {"pretrain"}),
        ("prepare/VALIDATION_FRACTION=0.1", {"prepare"}),
    ],
)
def test_a_setting_reaches_the_stages_that_read_it(binding, readers):
    chain = commands(binding)
    reached = {
        stage.command
        for stage in chain.stages
        if f"--gin.{binding}" in chain.main(stage)
    }
    assert reached == readers


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("BATCHSIZE=8", "did you mean BATCH_SIZE"),
        ("pretrain/BATCHSIZE=8", "did you mean pretrain/BATCH_SIZE"),
        ("NONSENSE=8", "top of each run file"),
        # There is such a macro, which is none of evaluation's.
        ("evaluate/TRAIN_STEPS=8", "no stage reads it"),
    ],
)
def test_a_setting_that_reaches_none_is_refused(binding, said):
    name = binding.partition("=")[0]
    with pytest.raises(BadInputError, match=f"^{name} has no effect on any.*{said}"):
        commands(binding)
