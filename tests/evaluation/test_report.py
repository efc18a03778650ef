import collections
import dataclasses
import functools
import html.parser
import json
import re

import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.evaluation import report_data
from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    StageTime,
    by_topic,
    compare,
    compare_with_control,
    masked_accuracy,
)
from realm_jax.evaluation.findings import verdicts
from realm_jax.evaluation.report import (
    render_html,
    render_json,
    work_of_stages,
    write_report,
)
from realm_jax.evaluation.report_data import RecordedStage, ReportData
from realm_jax.evaluation.templates import duration, points, probability
from realm_jax.metrics.curves import Level, curves_from_lines
from realm_jax.run_record import RunRecord

HOSTILE = "<script>alert('x')</script> & \"more\""


def run_info(title="A run"):
    made_of = "corpus", 3, 12, "abcdef0123456789ffff", "CC BY-SA"
    return report_data.RunInfo(
        title=title,
        finished="1 May 2026",
        corpus=report_data.CorpusInfo(*made_of),
        parameters={"Retriever": 1_234_567},
        settings={"SEED": "0"},
        machine="2 cores",
        versions={"jax": "0.10.2"},
        split="test",
        held_out_split="dev",
        stages=[StageTime("prepare", 61.0), StageTime("pretrain", 3723.0, 400)],
    )


def hits(share, count=100):
    return (np.arange(count) < share * count).astype(np.float64)


def spread(mean, count=100):
    """Values about a mean, as far below it as above."""
    return mean + np.linspace(-1, 1, count)


def stage_lines(steps, stage="pretrain", **metrics):
    """Lines of metrics; a function is of the step."""
    return [
        {"stage": stage, "step": step}
        | {name: of(step) if callable(of) else of for name, of in metrics.items()}
        for step in steps
    ]


@functools.cache
def full_data(text="plain"):
    lines = stage_lines(
        range(10, 201, 10),
        loss=lambda step: 5.0 - step / 100,
        retrieval_utility=lambda step: step / 200,
        index_step=lambda step: step // 40 * 40,
        index_age_steps=lambda step: step % 40,
        index_age_seconds=lambda step: 0.3 * (step % 40),
        recall_at_5=0.5,
    )
    lines += stage_lines([1], text, loss=float("nan"))
    lines += stage_lines([2], text, loss=1.0)
    documents = [
        report_data.ExampleDocument(-1, "", "", 0.25, 1.1e-14),
        report_data.ExampleDocument(7, text, f"{text} script", 0.75, 0.8),
    ]
    answered = report_data.AnsweredQuestion(
        text, [text, "b"], text, True, 0.5, text, before=text, after=text
    )
    unanswered = report_data.AnsweredQuestion("unanswered?", ["c"], "", False, 0.0, "")
    compared = {
        AFTER_WARM_START: {"recall@1": hits(0.2), "recall@5": hits(0.4)},
        AFTER_REALM: {"recall@1": hits(0.25), "recall@5": hits(0.6)},
        AFTER_FINETUNING: {"recall@5": hits(0.62), "exact match": hits(0.3)},
    }
    return ReportData(
        run=run_info(text),
        curves=curves_from_lines(lines),
        comparison=compare(compared),
        masked_accuracy=masked_accuracy(hits(0.5), hits(0.3), spread(0.4)),
        examples=[report_data.MaskedExample(text, "script", text, documents, 0.6)],
        questions=[answered, unanswered],
    )


def start(**changes):
    values = {
        "command": "pretrain",
        "started": "2026-05-01T10:00:00Z",
        "version": "0.2.0",
        "commit": "0123456789abcdef",
        "seed": 7,
        "arguments": ["--gin_file=gin/runs/pretrain.gin"],
        "settings": {"train_steps": 10, "optimizer": {"learning_rate": 5e-5}},
        "gin": "SEED = 7",
    }
    return RunRecord(**(values | changes))


def with_control(before, control_before, exact_match=None, control_exact_match=None):
    """A chain and its control, by recall@5 and perhaps exact match."""
    chain = {AFTER_REALM: {"recall@5": hits(before)}}
    control = {AFTER_REALM: {"recall@5": hits(control_before)}}
    if exact_match is not None:
        chain[AFTER_FINETUNING] = {"exact match": hits(exact_match)}
        control[AFTER_FINETUNING] = {"exact match": hits(control_exact_match)}
    times = StageTime("pretrain", 185.0, 200), StageTime("warm_start", 180.0, 1350)
    compared = compare_with_control(
        chain, control, realm_time=times[0], control_time=times[1]
    )
    return ReportData(run_info(), control=compared)


def worked_data():
    """A stage of two lines: 10 updates in 20 s, and 30 in 15 s."""
    parts = {"search": 0.25, "host": 0.0, "checkpoint": 0.05, "swap": 0.0}
    lines = [
        line
        for step, rate, padding in ((10, 0.5, 0.5), (40, 2.0, 0.1))
        for line in stage_lines(
            [step],
            steps_per_second=rate,
            examples_per_second=8 * rate,
            model_tflops_per_second=2 * rate,
            padding_share=padding,
            device_seconds=1 / rate - 0.3,
            **{f"{part}_seconds": value for part, value in parts.items()},
        )
    ]
    # Written before there was a time split.
    lines += stage_lines([5], "finetune", steps_per_second=1.0)
    return ReportData(run=run_info(), curves=curves_from_lines(lines))


def empty_data():
    corpus = report_data.CorpusInfo("c", 0, 0, "")
    return ReportData(report_data.RunInfo("Empty", "now", corpus, {}, {}, "m", {}))


class Page(html.parser.HTMLParser):
    """Collects what a browser would; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], []
        self.tags = collections.Counter()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] += 1
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [
            attrs[name] for name in ("href", "xlink:href", "src") if name in attrs
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(data):
    """The text of a page, with single spaces."""
    return " ".join(" ".join(Page(render_html(data)).text).split())


def require_parts(text, *parts):
    """Requires all parts, which | separates."""
    for part in "|".join(parts).split("|"):
        assert part in text, part


def test_the_page_is_sound_and_loads_nothing():
    controlled = with_control(0.5, 0.4, 0.2, 0.3)
    whole = full_data(), full_data(HOSTILE)
    for data in (*whole, worked_data(), empty_data(), controlled):
        text = render_html(data)
        page = Page(text)
        assert len(set(page.ids)) == len(page.ids)
        assert set(page.links) <= {f"#{name}" for name in page.ids}
        assert not re.search(r"@import|url\((?!#)", text)
        assert page.tags["script"] == 0
        # Pictures take their colours from the page.
        for picture in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
            assert not re.search(r"#[0-9a-f]{6}\b", picture)
            assert "var(--series)" in picture
            assert "aria-label=" in picture
    # What comes from text is escaped.
    page = Page(render_html(full_data(HOSTILE)))
    assert "".join(page.text).count("alert('x')") >= 8


def test_the_page_shows_every_part():
    text = shown(full_data())
    require_parts(
        text,
        "Recall@5 after REALM|40.0%|60.0%|+20.0|1.1 × 10 −14|1,234,567 parameters",
        "1 h 03 min|abcdef0123456789|CC BY-SA|No answer",
        "6 versions of the index; none was in use beyond an age of 30 steps (9.0 s).",
        "not a number",  # The loss of the second stage.
    )
    # Loss twice, utility, recall and index age.
    assert Page(render_html(full_data())).tags["svg"] == 5


def test_every_figure_of_the_summary_says_what_it_was_measured_on():
    index = {"index_step": 0, "index_age_steps": lambda step: step}
    found = {"retrieval_utility": 0.03, "held_out_utility": 0.2, "recall_at_5": 0.468}
    lines = stage_lines((10, 20), **found, **index)
    data = dataclasses.replace(full_data(), curves=curves_from_lines(lines))
    text = shown(data)
    require_parts(
        text,
        "+0.03 nats on training sentences and +0.20 on those of the validation split, "
        "recall@5 at 46.8% of the held-out dev questions.",
        "Recall@5 after REALM 60.0% of 100 test questions; was 40.0% before it",
        "Answered exactly 30.0% of 100 test questions;|100 spans of the validation spl",
        "Masked spans right 50.0% of 100 sentences of the validation split;",
        "answers 30.0% of 100 test questions exactly right",
        "Always the same held-out dev questions, searched whenever",
        "every step searched the one made before the first update.",
        "Before the first update 10 20 steps 46.8%",
    )
    # Where the splits are not known, nothing is made up.
    unknown = dataclasses.replace(data.run, split="", held_out_split="")
    text = shown(dataclasses.replace(data, run=unknown))
    assert "46.8% of the held-out questions." in text
    assert "of 100 questions; was" in text
    assert "test questions" not in text


def test_documents_that_hurt_held_out_sentences_are_no_good_news():
    lines = stage_lines([10], retrieval_utility=0.3, held_out_utility=-0.13)
    data = ReportData(run_info(), curves=curves_from_lines(lines))
    [finding] = json.loads(render_json(data))["health"]
    assert finding["level"] == "warning"
    assert "+0.30 nats on training sentences and -0.13 on those" in finding["text"]


def test_what_needs_no_training_stands_beside_the_stages():
    measured = {
        AFTER_WARM_START: {"recall@1": hits(0.2), "recall@5": hits(0.4)},
        AFTER_FINETUNING: {"recall@1": hits(0.5), "recall@5": hits(0.7)},
    }
    by_chance = {"recall@1": np.full(100, 0.0002), "recall@5": np.full(100, 0.001)}
    by_words = {"recall@1": hits(0.3), "recall@5": hits(0.5)}
    baselines = {"random blocks": by_chance, "BM25": by_words}
    compared = compare(measured, baselines)
    # The baselines are no stages: nothing changed from one of them to a model.
    changed = [(d.before, d.after) for d in compared.differences]
    assert changed == [(AFTER_WARM_START, AFTER_FINETUNING)] * 2
    data = ReportData(run_info(), comparison=compared)
    text = shown(data)
    shown_once = "Random blocks 0.02% 0.02% to 0.02% 0.1%"
    require_parts(text, shown_once, "BM25 30.0%", "BM25 50.0%")
    _, picture = re.findall(r'aria-label="recall@\d: ([^"]*)"', render_html(data))
    values = "warm start 40.0%, fine-tuning 70.0%, random blocks 0.1%, BM25 50.0%"
    assert picture == values
    missing = "No untrained baseline was measured"
    for shown_data, is_missing in ((full_data(), True), (data, False)):
        page = render_html(shown_data)
        assert (missing in page, "BM25" in page) == (is_missing, not is_missing)


def test_topics_stand_in_a_table_where_questions_have_them():
    topics = ["rivers", "towns", None, "towns", "rivers", "towns", "alps", "alps"]
    values = np.asarray([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    rows = by_topic(topics, {"exact match": values})
    found = [(r.label, r.metrics["exact match"]) for r in rows]
    assert [(label, one.count, one.mean) for label, one in found] == [
        ("towns", 3, pytest.approx(1 / 3)),
        ("alps", 2, 0.0),
        ("rivers", 2, 0.5),
        ("without a topic", 1, 1.0),
    ]
    text = shown(ReportData(run_info(), comparison=compare({}), topics=rows))
    assert "By topic" not in text  # It belongs to a comparison.
    data = dataclasses.replace(full_data(), topics=rows)
    assert "Towns 3 33.3%" in shown(data)
    assert by_topic([None, None], {"exact match": values[:2]}) == []
    assert "By topic" not in shown(full_data())


def test_each_stage_shows_what_it_recorded_or_that_it_did_not():
    first = start(settings={"train_steps": 5, "optimizer": {"learning_rate": 5e-5}})
    recorded = [
        RecordedStage("warm_start"),
        RecordedStage("pretrain", [first, start(started="2026-05-02T11:00:00Z")]),
        RecordedStage("build_index", [start(command="build-index", commit=None)]),
    ]
    data = ReportData(run_info(), recorded=recorded)
    text = shown(data)
    require_parts(
        text,
        "Warm start not recorded",
        "REALM pre-training Seed 7 Version 0.2.0 Commit 0123456789ab Started 2026-05",
        ", the last of 2 starts train_steps 10 , at the first start 5",
        "realm pretrain --gin_file=gin/runs/pretrain.gin",
        "optimizer.learning_rate 5e-05",
        "Index builder Seed 7 Version 0.2.0 Commit not recorded",
    )
    content = json.loads(render_json(data))["recorded"]
    assert content[0] == {"stage": "warm_start", "starts": []}
    assert content[1]["starts"][1]["settings"]["optimizer"] == {"learning_rate": 5e-5}
    assert content[1]["starts"][1]["gin"] == "SEED = 7"


def test_the_work_of_a_stage_is_counted_over_all_its_lines():
    (work,) = work_of_stages(worked_data().curves)
    assert (work.stage, work.model_flops_utilization) == ("pretrain", None)
    found = work.examples_per_second, work.model_tflops_per_second, work.padding_share
    means = [8 * 40 / 35, 2 * 40 / 35, (10 * 0.5 + 30 * 0.1) / 40]
    assert found == pytest.approx(means)
    seconds = {"device": 10 * 1.7 + 30 * 0.2, "search": 40 * 0.25, "host": 0.0}
    seconds |= {"checkpoint": 40 * 0.05, "swap": 0.0}
    shares = {part: value / 35 for part, value in seconds.items()}
    assert work.time_shares == pytest.approx(shares)
    assert json.loads(render_json(worked_data()))["work"][0]["stage"] == "pretrain"
    text = shown(worked_data())
    # 8 examples in 40 updates of 35 s; of these 23 s for the devices, 10 s searching.
    for part in ("9.1", "2.3", "20.0%", "65.7%", "28.6%", "5.7%"):
        assert f" {part} " in text, part
    assert "Speed, and what the time went into" in text
    assert "time went into" not in render_html(full_data())


def test_json_holds_the_numbers_and_nothing_else_where_a_number_is_meant():
    content = json.loads(
        render_json(full_data()),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    assert content["format_version"] == 1
    row = content["comparison"]["rows"][1]
    recall = row["metrics"]["recall@5"]
    found = row["label"], recall["mean"], recall["count"]
    assert found == (AFTER_REALM, pytest.approx(0.6), 100)
    difference = content["masked_accuracy"]["difference"]
    assert difference["mean"] == pytest.approx(0.5 - 0.3)
    assert content["curves"][-1]["values"] == [None, 1.0]
    assert content["health"][0]["level"] == "alarm"
    versions = [version["step"] for version in content["index_versions"]]
    assert versions == [0, 40, 80, 120, 160, 200]


def test_writing_leaves_both_files_and_nothing_else(tmp_path):
    write_report(full_data(), str(tmp_path))
    write_report(full_data(), str(tmp_path))
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {
        "report.html": render_html(full_data()),
        "report.json": render_json(full_data()),
    }
    with pytest.raises(BadInputError):
        write_report(full_data(), str(tmp_path / "report.json"))


def with_recall(before, after):
    stages = {AFTER_WARM_START: before, AFTER_REALM: after}
    return ReportData(
        run_info(),
        comparison=compare({k: {"recall@5": hits(v)} for k, v in stages.items()}),
    )


def with_utility(utility):
    """Not one span is right, and yet documents help, hurt, or do neither."""
    accuracy = masked_accuracy(hits(0), hits(0), spread(utility))
    return ReportData(run_info(), masked_accuracy=accuracy)


def test_verdicts_follow_the_intervals():
    good, neutral, warning = Level.GOOD, Level.NEUTRAL, Level.WARNING
    little = "+1.0 points, 95% interval 0.0 to +3.0"
    best = "REALM gained 100.0 points of recall@5 before fine-tuning (95% interval +1"
    same = "and made no measurable difference to exact match (0.0 points, 95% interval"
    lost = "and lost 20.0 points of exact match"
    for data, level, parts in (
        (
            with_recall(0.4, 0.6),
            good,
            "raised recall@5: 40.0% after the warm start, 60",
        ),
        (with_recall(0.6, 0.4), warning, "lowered recall@5"),
        (with_recall(0.4, 0.41), neutral, f"no measurable difference|({little}, 100"),
        (
            with_control(1.0, 0.0, 0.3, 0.3),
            good,
            f"same 100 test questions|{best}|{same}",
        ),
        (with_control(0.6, 0.4, 0.1, 0.3), warning, lost),
        (with_control(0.41, 0.4), neutral, f"recall@5 before fine-tuning ({little})."),
        (with_utility(0.4), good, "+0.40 nats|0.0% right against 0.0%"),
        (with_utility(-0.4), warning, "−0.40 nats"),
        (with_utility(0.0), neutral, ": 0.00 nats"),
    ):
        (finding,) = verdicts(data)
        assert finding.level is level
        require_parts(finding.text, parts)
        if data.comparison.rows:
            assert bool(finding.advice) == (level is Level.WARNING)


def test_why_no_question_can_be_answered_is_said():
    measured = {"recall@100": np.zeros(30), "exact match": np.zeros(30)}
    data = ReportData(run_info(), comparison=compare({AFTER_FINETUNING: measured}))
    _, finding = verdicts(data)
    assert finding.level is Level.WARNING
    assert "None of 30 test questions has an answer in the 100 blocks" in finding.text
    measured["recall@100"][3] = 1.0
    data = ReportData(run_info(), comparison=compare({AFTER_FINETUNING: measured}))
    assert len(verdicts(data)) == 1


def test_the_page_says_what_realm_did():
    data = with_control(0.6, 0.4, 0.3, 0.25)
    assert "control" in Page(render_html(data)).ids
    require_parts(
        shown(data),
        "What REALM did|With REALM Without REALM Difference, points|▲ +20.0|▲ +5.0",
        "Recall@5 before fine-tuning 60.0%|Exact match after fine-tuning 30.0%",
        "200 updates in 3 min 05 s; the control's warm start went on for 1,350 updates",
    )
    assert "What REALM did" not in render_html(full_data())
    control = json.loads(render_json(data))["control"]
    _, figure = control["figures"]
    assert (figure["metric"], figure["moment"]) == ("exact match", "after fine-tuning")
    assert figure["difference"]["mean"] == pytest.approx(0.05)
    assert control["control_time"]["seconds"] == 180.0
    assert json.loads(render_json(full_data()))["control"] is None


def test_the_best_checkpoint_is_named_on_the_page_and_in_the_json():
    worse = "; the last checkpoint, of step 1,600, has +0.49."
    for checkpoint, said in (
        ((400, 0.52, 1600, 0.49), f"+0.52 nats at step 400{worse}"),
        ((400, 0.52, 1600), "+0.52 nats at step 400."),
        ((1600, -0.02, 1600, -0.02), "−0.02 nats at step 1,600, the last checkpoint."),
    ):
        best = report_data.BestCheckpoint(*checkpoint)
        data = ReportData(run_info(), best_checkpoint=best)
        (finding,) = verdicts(data)
        assert finding.text == f"Best held-out utility (validation split) {said}"
        assert finding.text in render_html(data)
        found = json.loads(render_json(data))["best_checkpoint"]
        assert found == dataclasses.asdict(best)


def test_what_was_measured_on_held_out_sentences_is_drawn():
    names = ("utility", "accuracy", "null_accuracy", "null_retrieval")
    lines = stage_lines([10], **{f"held_out_{name}": 0.25 for name in names})
    require_parts(
        render_html(ReportData(run_info(), curves=curves_from_lines(lines))),
        "Retrieval utility, held-out sentences of REALM pre-training: +0.25",
        "Masked spans right, held-out sentences of REALM pre-training: 25.0%",
        "The same without documents of REALM pre-training: 25.0%",
        "Null document, held-out sentences of REALM pre-training: 25.0%",
    )


def test_the_verdict_on_the_index_is_all_that_curves_alone_say():
    (finding,) = verdicts(ReportData(run_info(), curves=full_data().curves))
    assert "6 versions of the index; none was in use beyond an age" in finding.text


def test_numbers_are_readable():
    chances = [probability(value) for value in (0.129, 1.0, 0.0, 0.001)]
    assert chances == ["0.129", "1.000", "0.000", "0.001"]
    assert probability(1.1e-14) == "1.1 × 10<sup>−14</sup>"
    assert probability(0.00096) == "9.6 × 10<sup>−4</sup>"
    said = [duration(seconds) for seconds in (0.34, 59.4, 59.9, 754, 7260)]
    assert said == ["0.3 s", "59 s", "1 min 00 s", "12 min 34 s", "2 h 01 min"]
    differences = (0.192, -0.05, 0.0, -0.0001)
    assert [points(one) for one in differences] == ["+19.2", "−5.0", "0.0", "0.0"]
