"""Every example runs, and prints what its docstring says."""

import json
import pathlib
import re
import runpy
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

import realm_jax
from realm_jax.training import finetune
from tests import tiny_run
from tests import tiny_world as tiny

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("traced_once")]

EXAMPLES = tiny_run.ROOT / "examples"


@pytest.fixture(scope="module")
def model_dir(world, tmp_path_factory):
    config = tiny.finetune_config(world, tmp_path_factory.mktemp("model"), num_read=4)
    assert finetune.run(config, tiny.silent, tiny.NEVER)
    return config.model_dir


def run(name, *arguments, cwd=tiny_run.ROOT):
    """Runs an example as a person would, and returns the lines it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        cwd=cwd,
        env=tiny_run.environment() | {"PYTHONPATH": str(tiny_run.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_ask_a_model(model_dir, world):
    question = "kise posa feso fedi"
    model = realm_jax.load(model_dir)
    expected = model.answer(question)
    first, header, *lines = run("ask_a_model.py", model_dir, world.corpus, question)
    assert first == f"{expected.text}  p = {expected.probability:.3f}"
    assert header.split() == ["p(document)", "p(answer)", "title"]
    assert len(lines) == 4 + 1 + 10
    for line, document in zip(lines, expected.documents, strict=False):
        chances = [float(word) for word in line.split()[:2]]
        assert chances == pytest.approx(
            [document.probability, document.answer_probability], abs=6e-4
        )
    scores = [float(line.split()[0]) for line in lines[5:]]
    assert scores == sorted(scores, reverse=True)


def test_own_corpus_and_task(tmp_path):
    names, *shown = run("own_corpus_and_task.py", tmp_path / "made", cwd=tmp_path)
    assert names.split() == [
        *("towns_blocks", "towns_ict", "towns_salient", "towns_terms"),
        *("towns_random_tokens", "towns_random_spans", "towns_years"),
    ]
    assert len(shown) == 2
    for line in shown:
        assert re.fullmatch(r".*\[MASK\].*->  14\d\d", line), line
    assert realm_jax.open_corpus(tmp_path / "made" / "corpus").num_blocks == 40


def test_custom_objective(world):
    lines = [line.split() for line in run("custom_objective.py", world.corpus, 100)]
    assert [int(line[0]) for line in lines] == [20, 40, 60, 80, 100]
    losses = [float(line[1]) for line in lines]
    assert losses[-1] < 0.5 * losses[0]
    found = [float(line[2]) for line in lines]
    assert found[-1] > found[0]


def test_own_encoder():
    """The stages train it and open it again in `tests/models/test_encoders.py`."""
    bert, own = run("own_encoder.py")
    assert bert == "BertConfig: 22.7 M parameters"
    # Five layers fewer, of 1.77 M each, and neither segments nor pooler.
    assert own == "SharedLayersConfig: 13.7 M parameters"


def test_own_objective():
    """A stage trains with it in `tests/training/test_own_objective.py`."""
    retrieval, gradient = run("own_objective.py")
    assert retrieval == "p(z|x)    +0.60 +0.30 +0.10"
    # The reader needs the third document, which the retriever hardly trusts.
    assert gradient == "gradient  +0.60 +0.30 -0.90"


def test_own_searcher(model_dir, world):
    question = "kise posa feso fedi"
    found, answer = run("own_searcher.py", model_dir, world.corpus, question)
    number = int(re.fullmatch(r"(\d) of 5 blocks found", found).group(1))
    assert 1 <= number <= 5
    assert re.fullmatch(r".+  p = [01]\.\d{3}", answer)


def test_the_searcher_of_the_example_finds_the_best_of_what_it_searches():
    names = runpy.run_path(str(EXAMPLES / "own_searcher.py"))
    embeddings = np.random.default_rng(0).standard_normal((100, 8))
    searcher = names["ClusteredSearcher"](embeddings, step=3)
    queries = np.random.default_rng(1).standard_normal((7, 8))
    found = searcher.search(queries, 120)
    for query, ids, scores in zip(queries, found.ids, found.scores, strict=True):
        searched = ids[ids >= 0]
        assert 0 < len(searched) < 100
        assert len(set(searched)) == len(searched)
        expected = np.sort(embeddings[searched] @ query)[::-1]
        np.testing.assert_allclose(scores[: len(searched)], expected, rtol=1e-4)
        assert np.all(np.isneginf(scores[len(searched) :]))
    assert searcher.sample().shape == (64, 8)


@pytest.mark.timeout(1200)
def test_index_refresh(monkeypatch):
    """Its cells run in order; what it says of recall and drift is so."""
    monkeypatch.chdir(tiny_run.ROOT)
    notebook = json.loads((EXAMPLES / "index_refresh.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "notebook"}
    with matplotlib.rc_context({"backend": "Agg"}):
        for number, cell in enumerate(cells):
            source = "".join(cell["source"])
            exec(compile(source, f"cell {number}", "exec"), names)
        pyplot = names["plt"]
        assert len(pyplot.get_fignums()) == 3
        pyplot.close("all")
    recall, drift, last = names["recall"], names["drift"], names["STEPS"]
    versions = names["versions"]
    assert versions == [*range(0, last, names["REFRESH_PERIOD"]), last]
    assert recall[0, 0] < 0.2
    # 0.58 where the notebook was made; another rounding gives another model.
    assert recall[last, last] >= 0.4
    # The first index finds little for the towers of the end, and its rows are far off.
    assert recall[0, last] < 0.5 * recall[last, last]
    assert not any(drift[version, version] for version in versions)
    ages = [drift[version, last] for version in versions]
    assert ages[0] > ages[-2] > 0.0
    # The outputs that were committed are of these cells.
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


def test_every_example_is_run_here():
    here = pathlib.Path(__file__).read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f'"{path.name}"' in here, path
