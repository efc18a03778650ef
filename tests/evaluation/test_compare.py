import dataclasses
import json
import random

import numpy as np
import pytest

from realm_jax.cli.main import main
from realm_jax.evaluation.compare import compare_runs, read_run, render_comparison
from realm_jax.evaluation.comparisons import AFTER_FINETUNING, AFTER_REALM
from realm_jax.evaluation.report import write_report
from realm_jax.evaluation.report_data import ReportData
from realm_jax.manifests import FileRecord
from realm_jax.metrics.retrieval import bootstrap_interval, paired_bootstrap_difference
from tests.evaluation.test_report import HOSTILE, Page, require_parts, run_info, start
from tests.flipped import read_flipped
from tests.json_lines import write_lines
from tests.refused import refused

COUNT = 60


def line(number, *, right, found, text="plain", **changes):
    return {
        "id": f"q{number}",
        "question": f"Question {number}?",
        "answers": ["yes"],
        "prediction": "yes" if right else text,
        "correct": bool(right),
        "measured": {
            AFTER_REALM: {"recall@5": float(found)},
            AFTER_FINETUNING: {"exact match": float(right), "F1": 0.5 + 0.5 * right},
        },
        **changes,
    }


def write_run(folder, lines, starts=None, versions="0.10"):
    write_lines(folder / "predictions.jsonl", lines)
    if starts is not None:
        recorded = [
            {"stage": stage, "starts": list(map(dataclasses.asdict, of_stage))}
            for stage, of_stage in starts.items()
        ]
        run = {"title": folder.name, "versions": {"jax": versions}, "split": "test"}
        report = {"format_version": 1, "run": run, "recorded": recorded}
        (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


@pytest.fixture(scope="module")
def outcomes():
    """Of each question whether the two runs find and answer it; they often agree."""
    draw = random.Random(5)
    first = [(draw.random() < 0.5, draw.random() < 0.6) for _ in range(COUNT)]
    second = [
        (right if draw.random() < 0.8 else not right, found or draw.random() < 0.3)
        for right, found in first
    ]
    return first, second


@pytest.fixture
def runs(tmp_path, outcomes):
    first, second = (
        [line(i, right=right, found=found) for i, (right, found) in enumerate(run)]
        for run in outcomes
    )
    changed = {"train_steps": 20, "optimizer": {"learning_rate": 5e-5}, "own": True}
    of_first = {"pretrain": [start()], "finetune": [start(command="finetune")]}
    last = start(seed=1, commit=None, settings=changed)
    of_second = {
        "pretrain": [start(settings={"train_steps": 99}), last],
        "finetune": [],
    }
    # The second was asked in another order.
    other = write_run(tmp_path / "b", second[::-1], of_second, versions="0.11")
    return write_run(tmp_path / "a", first, of_first), other


def test_two_runs_are_compared_question_by_question(runs, outcomes):
    comparison = compare_runs(*map(read_run, runs))
    values = read_run(runs[0]).values[AFTER_FINETUNING]["F1"]
    assert (values.dtype, values.shape) == (np.float64, (COUNT,))
    recall, exact_match, f1 = comparison.figures
    found = [(figure.label, figure.metric) for figure in (recall, exact_match, f1)]
    after = AFTER_FINETUNING
    assert found == [(AFTER_REALM, "recall@5"), (after, "exact match"), (after, "F1")]
    for column, figure in enumerate((exact_match, recall)):
        first, second = (
            np.asarray([question[column] for question in run], np.float64)
            for run in outcomes
        )
        assert figure.first == bootstrap_interval(first)
        assert figure.second == bootstrap_interval(second)
        assert figure.difference == paired_bootstrap_difference(first, second)
        assert figure.difference.mean == pytest.approx((second - first).mean())


def test_answers_that_changed_are_listed_on_their_side(runs, outcomes):
    comparison = compare_runs(*map(read_run, runs))
    first, second = outcomes
    right = [(a, b) for (a, _), (b, _) in zip(first, second, strict=True)]
    won = [f"Question {i}?" for i, (a, b) in enumerate(right) if b and not a]
    lost = [f"Question {i}?" for i, (a, b) in enumerate(right) if a and not b]
    assert [answer.question for answer in comparison.won] == won
    assert [answer.question for answer in comparison.lost] == lost
    answers = {(answer.first, answer.second) for answer in comparison.won}
    assert answers == {("plain", "yes")}


def test_what_the_last_starts_of_a_stage_differ_in_is_listed(runs):
    changes = compare_runs(*map(read_run, runs)).settings
    listed = {
        stage: [(c.name, c.first, c.second) for c in found]
        for stage, found in changes.items()
    }
    assert listed == {
        "": [("versions.jax", "0.10", "0.11")],
        "pretrain": [
            ("commit", "0123456789abcdef", "not recorded"),
            ("seed", "7", "1"),
            ("train_steps", "10", "20"),
            ("own", "–", "true"),
        ],
        "finetune": [("settings", "recorded", "not recorded")],
    }


def test_predictions_of_earlier_versions_are_compared_by_exact_match(runs, tmp_path):
    old = [line(i, right=i % 2, found=True) for i in range(COUNT)]
    for record in old:
        del record["measured"]
    place = write_run(tmp_path / "old", old)
    for path in (place, f"{place}/predictions.jsonl"):
        comparison = compare_runs(read_run(path), read_run(runs[0]))
        [figure] = comparison.figures
        assert (figure.label, figure.metric) == (AFTER_FINETUNING, "exact match")
        assert figure.first.mean == 0.5
        assert comparison.settings["finetune"][0].first == "not recorded"


def test_the_command_writes_a_sound_page_that_shows_what_was_compared(
    runs, outcomes, tmp_path, capsys
):
    out = tmp_path / "out"
    assert main(["compare", *runs, f"--output={out}"]) == 0
    recall, exact_match, f1, place = capsys.readouterr().out.splitlines()
    first, second = (sum(found for _, found in run) / COUNT for run in outcomes)
    gained = f"+{100 * (second - first):.1f} points (95% interval "
    said = f"After REALM, recall@5: {first:.1%} and {second:.1%}, {gained}"
    assert recall.startswith(said)
    assert exact_match.startswith("After fine-tuning, exact match: ")
    assert f1.startswith("After fine-tuning, F1: ")
    assert place == f"the comparison is in {out}/compare.html"
    comparison = compare_runs(*map(read_run, runs))
    written = {path.name: path.read_text() for path in out.iterdir()}
    assert written.keys() == {"compare.html", "compare.json"}
    page = Page(written["compare.html"])
    assert page.tags["script"] == 0
    require_parts(
        " ".join(" ".join(page.text).split()),
        "60 questions that both were asked|Exact match after fine-tuning|own – true",
        "Recall@5 after REALM|REALM pre-training",
        f"Right in the second alone: {len(comparison.won)}",
    )
    content = json.loads(written["compare.json"])
    assert content["num_questions"] == COUNT
    assert content["figures"][0]["metric"] == "recall@5"
    assert content["settings"]["pretrain"][1]["second"] == "1"


def test_what_comes_from_text_is_escaped(tmp_path):
    lines = [
        line(0, right=False, found=True, text=HOSTILE, question=HOSTILE),
        line(1, right=True, found=True),
    ]
    others = [line(0, right=True, found=True, question=HOSTILE), lines[1]]
    places = write_run(tmp_path / "a", lines), write_run(tmp_path / "b", others)
    page = Page(render_comparison(compare_runs(*map(read_run, places))))
    assert page.tags["script"] == 0
    assert "".join(page.text).count("alert('x')") == 2


def test_other_questions_cannot_be_compared(tmp_path):
    lines = [line(i, right=True, found=True) for i in range(3)]
    first = write_run(tmp_path / "a", lines)
    for name, changes, said in (
        ("b", {"question": "Another?"}, "0 that only one of them has and 1 with other"),
        ("c", {"answers": ["no"]}, "1 with other words or answers, such as 'q1'"),
        ("d", {"id": "x"}, "2 that only one of them has"),
    ):
        others = [lines[0], {**lines[1], **changes}, lines[2]]
        second = write_run(tmp_path / name, others)
        with refused(f"the same questions .*{first}.*{said}"):
            compare_runs(read_run(first), read_run(second))


def test_no_changed_bit_of_an_evaluation_is_believed(tmp_path):
    data = f"{json.dumps(line(0, right=True, found=True))}\n"
    (tmp_path / "predictions.jsonl").write_text(data)
    files = {"predictions.jsonl": FileRecord.of(data.encode())}
    report = ReportData(run_info(), recorded=[], files=files)
    write_report(report, str(tmp_path))
    sound = read_run(str(tmp_path))
    for name in ("predictions.jsonl", "report.json"):
        read = read_flipped(tmp_path / name, lambda: read_run(str(tmp_path)), every=97)
        assert len(read) < 3
        assert all(run.facts == sound.facts for run in read)
    assert read_run(str(tmp_path)).records == sound.records


def test_damaged_predictions_are_bad_input(tmp_path):
    whole = line(0, right=True, found=True)
    other = line(1, right=True, found=True, measured={})
    for place in (tmp_path, tmp_path / "nowhere"):
        with refused(r"predictions\.jsonl, found none"):
            read_run(str(place))
    for text, said in (
        ("", "expected predictions in"),
        ("[]\n", "expected a JSON object"),
        ('{"id": "q0"}\n', "it has no 'question'"),
        (json.dumps(whole | {"correct": "yes"}), "its 'correct' is 'yes'"),
        (f"{json.dumps(whole)}\n{json.dumps(other)}", "the same figures of every"),
    ):
        (tmp_path / "predictions.jsonl").write_text(text)
        with refused(f"{said}.*{tmp_path}|{tmp_path}.*{said}"):
            read_run(str(tmp_path))
