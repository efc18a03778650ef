"""What `bench.gpu` measures, at sizes for a CPU; a GPU's figures are not tested."""

import dataclasses

import jax
import numpy as np
import pytest

from bench import gpu, train_step

TINY = dataclasses.replace(
    gpu.QUICK,
    update=train_step.Size(1, 16, 2, document=16, batch=2, query=16),
    blocks=500,
    embedded=4,
    matrix=64,
    bytes=1 << 20,
    repetitions=1,
)


@pytest.fixture(scope="module")
def result():
    return gpu.measure(TINY, peers=None)


@pytest.mark.full
def test_every_figure_stands_beside_its_limit(result):
    text = gpu.markdown(result, "python -m bench.gpu --quick")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(list(gpu.rows(result))) + 2
    assert "45 %" in text
    assert "500 blocks" in text
    update = result["update"]
    assert 0 <= update["search_share"] < 1
    rate = result["limits"]["flops"]
    assert update["utilisation"] * update["seconds"] * rate == pytest.approx(
        update["teraflop"] * 1e12
    )


def test_the_random_corpus_fills_the_inputs_of_an_update():
    embeddings, tokens = gpu.corpus(TINY)
    assert embeddings.rows.shape[0] == tokens.ids.shape[0] >= TINY.blocks
    pieces = np.asarray(tokens.ids)
    assert pieces.min() >= 1000
    assert pieces.max() < 30_522
    lengths = np.asarray(tokens.title_lengths) + np.asarray(tokens.body_lengths)
    # [CLS], two [SEP], and no padding.
    assert (lengths + 3 == TINY.update.document).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a CPU")
def test_the_full_form_is_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "--quick" in capsys.readouterr().err
