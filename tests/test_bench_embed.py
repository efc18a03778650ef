"""What `bench.embed` compares, without the peers, which have their own Python."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench import embed, processes
from bench.index_embed import invent_blocks
from realm_jax.errors import BadInputError

MINILM = Path(__file__).parents[1] / ".cache/data/minilm-l6"


def plain_mean(tensors, config, ids, segments):
    """The mean over the wordpieces of one sequence by MiniLM, in float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x):
        from math import erf

        return x * (1 + np.vectorize(erf)(x / 2**0.5)) / 2

    places = np.arange(len(ids))
    x = norm(
        sum(
            weights[f"embeddings.{kind}_embeddings.weight"][of]
            for kind, of in (
                ("word", ids),
                ("position", places),
                ("token_type", segments),
            )
        ),
        "embeddings.LayerNorm",
    )
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            np.stack(
                np.split(
                    linear(x, f"{layer}.attention.self.{part}"),
                    config["num_attention_heads"],
                    axis=-1,
                )
            )
            for part in ("query", "key", "value")
        )
        scores = np.exp(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5)
        read = scores / scores.sum(-1, keepdims=True) @ value
        read = linear(np.concatenate(list(read), -1), f"{layer}.attention.output.dense")
        x = norm(x + read, f"{layer}.attention.output.LayerNorm")
        hidden = gelu(linear(x, f"{layer}.intermediate.dense"))
        hidden = linear(hidden, f"{layer}.output.dense")
        x = norm(x + hidden, f"{layer}.output.LayerNorm")
    return x.mean(0)


@pytest.mark.full
def test_what_the_peers_are_compared_with_is_minilm(tmp_path, capsys, monkeypatch):
    store = invent_blocks(tmp_path / "corpus", 6, 20, 40)
    line = [str(tmp_path / "corpus"), f"--case={tmp_path}", f"--weights={MINILM}"]
    line += ["--settings={}", "--blocks=4", "--document_length=40", "--repetitions=1"]
    monkeypatch.setattr("sys.argv", ["embed", *line])
    embed.main()
    measured = json.loads(capsys.readouterr().out)
    assert len(measured["seconds"]) == 1
    found = np.load(tmp_path / "ours.npy")
    assert found.shape == (4, 128)
    block_ids = np.linspace(0, 5, 4).astype(int)
    ids, segments = store.document_ids(block_ids, 40)
    tensors = load_file(MINILM / "model.safetensors")
    config = json.loads((MINILM / "config.json").read_text())
    means = [
        plain_mean(tensors, config, row[row != 0], part[row != 0])
        for row, part in zip(ids, segments, strict=True)
    ]
    tower = embed._params(MINILM)["tower"]
    np.testing.assert_allclose(
        found, embed._projected(np.stack(means), tower), atol=2e-3
    )


@pytest.mark.process("what fails is a program, of a bare Python")
def test_what_fails_is_said_in_one_line(monkeypatch, tmp_path):
    with pytest.raises(BadInputError, match="make peers"):
        processes.require_peers(tmp_path / "python")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(BadInputError, match="make bench"):
        processes.require_peers(tmp_path)
    with pytest.raises(BadInputError, match=r"exit code 1.*no such thing"):
        processes.run_json(["python3", "-c", "raise SystemExit('no such thing')"])


def test_repetitions_become_a_median_with_its_range():
    runs = [{"seconds": [3.0, 1.0], "peak_gib": 2.0}, {"seconds": [2.0], "peak_gib": 3}]
    assert processes.medians(runs) == {
        "seconds": 2.0,
        "least": 1.0,
        "most": 3.0,
        "peak_gib": 3,
    }
