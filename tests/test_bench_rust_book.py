"""Tests for the queries of the Rust book's interactive edition."""

import json
import pathlib

from bench.rust_book import write
from tests.refused import refused

_QUIZ = """
[[questions]]
type = "MultipleChoice"
prompt.prompt = \"\"\"
What does `{name}`
do here?

```rust
let hidden = 1;
```
\"\"\"
prompt.distractors = ["nothing"]
answer.answer = "it binds"

[[questions]]
type = "Tracing"
prompt.program = "fn main() {{}}"
answer.doesCompile = true
"""


def _book(folder: pathlib.Path, **names: str) -> pathlib.Path:
    """Writes a book whose pages have a quiz each, about a name."""
    (folder / "src").mkdir()
    (folder / "quizzes").mkdir()
    for page, name in names.items():
        (folder / "quizzes" / f"{page}-sec1.toml").write_text(_QUIZ.format(name=name))
        (folder / "src" / f"{page}.md").write_text(
            f"# Of {name}\n\nText.\n\n{{{{#quiz ../quizzes/{page}-sec1.toml}}}}\n"
        )
    return folder


def test_a_question_without_its_code_asks_for_its_page(tmp_path):
    book = _book(tmp_path, ch01="let", ch02="static")
    write(book, tmp_path / "out")
    lines = (tmp_path / "out/queries.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": asked, "question": asked, "gold_ids": [page]}
        for asked, page in [
            ("What does let do here?", "ch01.md"),
            ("What does static do here?", "ch02.md"),
        ]
    ]
    assert (tmp_path / "out/pages/ch01.md").read_text().strip() == "# Of let\n\nText."


def test_what_two_pages_ask_and_quizzes_of_programs_are_left_out(tmp_path):
    write(_book(tmp_path, ch01="let", ch02="let", inventory="static"), tmp_path / "out")
    assert not (tmp_path / "out/queries.jsonl").read_text()


def test_another_folder_is_refused(tmp_path):
    with refused("expected pages of the Rust book"):
        write(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
