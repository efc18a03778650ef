"""`bench.finetune_inputs` fine-tunes either way and times what the host does."""

import pytest

from bench import finetune_inputs


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_an_update_and_its_labels_are_timed(tmp_path, ahead):
    sizes = finetune_inputs.Sizes(
        blocks=60, retrieved=20, questions=2, hidden=16, joined=64
    )
    corpus = tmp_path / "corpus"
    finetune_inputs.make_corpus(corpus, sizes)
    found = finetune_inputs.measure(tmp_path / "run", corpus, sizes, ahead, updates=4)
    assert found["update"] > found["labels"] > 0
    assert found["search"] <= found["update"]
