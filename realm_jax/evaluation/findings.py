"""Summarises the results of a run in sentences, one for each comparison."""

import itertools
from collections.abc import Iterator

from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    EXACT_MATCH,
    F1,
    MOMENTS,
    ControlComparison,
    ControlFigure,
    MaskedAccuracy,
    recall_name,
)
from realm_jax.evaluation.report_data import (
    BestCheckpoint,
    ChosenCheckpoint,
    ReportData,
)
from realm_jax.metrics.curves import Finding, Level, index_versions, made_at
from realm_jax.metrics.retrieval import Interval

_MOST_RETRIEVED = 20
"""The largest k of recall@k in `run.RECALL_AT`."""


def percent(rate: float) -> str:
    """Formats a rate as a percentage with one decimal, with two if it is that small."""
    return f"{100 * rate:.{2 if 0.0 < abs(rate) < 0.0005 else 1}f}%"


def points(difference: float) -> str:
    """Formats a difference of rates in percentage points, with its sign."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if float(text) == 0.0 else text.replace("-", "−")


def nats(difference: float) -> str:
    """Formats a difference of log-probabilities, with its sign."""
    text = f"{difference:+.2f}"
    return "0.00" if float(text) == 0.0 else text.replace("-", "−")


def duration(seconds: float) -> str:
    """Formats a duration in seconds in its one or two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def verdicts(data: ReportData) -> list[Finding]:
    """Returns a finding for every comparison: better, worse or no difference."""
    return list(_verdicts(data))


def _verdicts(data: ReportData) -> Iterator[Finding]:
    before, after = (
        data.comparison.find(label, recall_name(5))
        for label in (AFTER_WARM_START, AFTER_REALM)
    )
    change = data.comparison.find_change(AFTER_WARM_START, AFTER_REALM, recall_name(5))
    questions = data.run.questions
    if before and after and change:
        yield _pretraining(before, after, change, questions)
    if data.control:
        yield from control_verdict(data.control, questions)
    if data.masked_accuracy:
        yield _masked_spans(data.masked_accuracy)
    if data.best_checkpoint:
        yield _best_checkpoint(data.best_checkpoint)
    answered = data.comparison.find(AFTER_FINETUNING, EXACT_MATCH)
    if answered:
        yield Finding(
            Level.NEUTRAL,
            f"The fine-tuned reader answers {percent(answered.mean)} of "
            f"{answered.count:,} {questions} exactly right (95% interval "
            f"{percent(answered.low)} to {percent(answered.high)})"
            f"{_with_f1(data.comparison.find(AFTER_FINETUNING, F1))}.",
        )
        yield from _without_answers(data)
    if data.finetuned_checkpoint:
        yield _chosen_checkpoint(data.finetuned_checkpoint)
    versions = index_versions(data.curves)
    if versions:
        yield _refreshes(data)


def _without_answers(data: ReportData) -> Iterator[Finding]:
    """Yields why no question could be answered, if no block had an answer."""
    name = recall_name(_MOST_RETRIEVED)
    recall = data.comparison.find(AFTER_FINETUNING, name)
    if recall and recall.mean == 0:
        yield Finding(
            Level.WARNING,
            f"None of {recall.count:,} {data.run.questions} has an answer in the "
            f"{_MOST_RETRIEVED} blocks retrieved for it ({name} 0%), so the reader "
            "could not find it.",
            "Check that the answers are spelled as in the text, that their articles "
            "are in the corpus, and that titles of questions are those of articles.",
        )


def _with_f1(f1: Interval | None) -> str:
    if f1 is None:
        return ""
    return f"; F1 {percent(f1.mean)} ({percent(f1.low)} to {percent(f1.high)})"


def _pretraining(
    before: Interval, after: Interval, change: Interval, questions: str
) -> Finding:
    figures = (
        f"{percent(before.mean)} after the warm start, {percent(after.mean)} after "
        f"REALM ({_measured_difference(change)}, {change.count:,} {questions})"
    )
    if change.low > 0:
        return Finding(Level.GOOD, f"REALM pre-training raised recall@5: {figures}.")
    if change.high < 0:
        return Finding(
            Level.WARNING,
            f"REALM pre-training lowered recall@5: {figures}. The interval lies below "
            "zero.",
            "See the curves: a collapse calls for more frequent refreshes and a lower "
            "rate, a slow decline for fewer steps.",
        )
    return Finding(
        Level.NEUTRAL,
        f"REALM pre-training made no measurable difference to recall@5: {figures}. "
        "The interval includes zero.",
    )


def control_verdict(
    control: ControlComparison, questions: str = "questions"
) -> Iterator[Finding]:
    """Yields a finding on what REALM gained and lost against its control.

    It is based on recall@5 and exact match; a difference with an interval that includes
    zero is not measurable. Nothing is yielded if neither was measured.

    Args:
      control: the comparison.
      questions: what the finding calls the questions.
    """
    found = [
        figure
        for moment, metric in itertools.product(
            MOMENTS.values(), (recall_name(5), EXACT_MATCH)
        )
        if (figure := control.find(moment, metric))
    ]
    if not found:
        return
    gained = any(figure.difference.low > 0 for figure in found)
    lost = any(figure.difference.high < 0 for figure in found)
    clauses = [_against_control(figure) for figure in found]
    *first, last = clauses
    together = f"{', '.join(first)} and {last}" if first else last
    yield Finding(
        Level.WARNING if lost else Level.GOOD if gained else Level.NEUTRAL,
        f"On the same {found[0].difference.count:,} {questions}, compared with the "
        f"same chain without it, REALM {together}.",
    )


def _against_control(figure: ControlFigure) -> str:
    difference = figure.difference
    what = figure.metric
    if what != EXACT_MATCH:
        what = f"{what} {figure.moment}"
    interval = f"95% interval {points(difference.low)} to {points(difference.high)}"
    size = f"{100 * abs(difference.mean):.1f} points"
    if difference.low > 0:
        return f"gained {size} of {what} ({interval})"
    if difference.high < 0:
        return f"lost {size} of {what} ({interval})"
    return (
        f"made no measurable difference to {what} ({points(difference.mean)} points, "
        f"{interval}, which includes zero)"
    )


def _masked_spans(accuracy: MaskedAccuracy) -> Finding:
    """Judges by the utility, more informative than accuracy if most spans are wrong."""
    utility, right = accuracy.utility, accuracy.difference
    figures = (
        f"{nats(utility.mean)} nats of log-probability over the null document alone "
        f"(95% interval {nats(utility.low)} to {nats(utility.high)}, "
        f"{utility.count:,} spans of the validation split); "
        f"{percent(accuracy.with_retrieval.mean)} right against "
        f"{percent(accuracy.null_only.mean)} ({_measured_difference(right)})"
    )
    if utility.low > 0:
        return Finding(
            Level.GOOD, f"Documents help to fill in masked spans: {figures}."
        )
    if utility.high < 0:
        return Finding(
            Level.WARNING, f"Documents make filling in masked spans worse: {figures}."
        )
    return Finding(
        Level.NEUTRAL,
        f"Documents make no measurable difference to masked spans: {figures}.",
    )


def _best_checkpoint(best: BestCheckpoint) -> Finding:
    text = (
        f"Best held-out utility (validation split) {nats(best.utility)} nats at step "
        f"{best.step:,}"
    )
    if best.step == best.last_step:
        return Finding(Level.NEUTRAL, f"{text}, the last checkpoint.")
    if best.last_utility is not None:
        text += (
            f"; the last checkpoint, of step {best.last_step:,}, has "
            f"{nats(best.last_utility)}"
        )
    return Finding(
        Level.NEUTRAL, f"{text}.", 'CHECKPOINT="best" fine-tunes and measures that one.'
    )


def _chosen_checkpoint(chosen: ChosenCheckpoint) -> Finding:
    text = f"The fine-tuned reader is that of step {chosen.step:,}"
    if chosen.step == chosen.last_step:
        return Finding(
            Level.NEUTRAL,
            f"{text}, the last checkpoint ({percent(chosen.exact_match)} exact match "
            "on the questions that fine-tuning held out).",
        )
    return Finding(
        Level.NEUTRAL,
        f"{text}, chosen by exact match on the questions that fine-tuning held out: "
        f"{percent(chosen.exact_match)}, and {percent(chosen.last_exact_match)} at the "
        f"last step, {chosen.last_step:,}.",
        'FINETUNED_CHECKPOINT="last" measures that one.',
    )


def _refreshes(data: ReportData) -> Finding:
    versions = index_versions(data.curves)
    if len(versions) == 1:
        return Finding(
            Level.NEUTRAL,
            "The index was never replaced during pre-training: every step searched "
            f"the one made {made_at(versions[0].step)}.",
        )
    oldest = max((v.oldest_steps or 0.0) for v in versions)
    seconds = max((v.oldest_seconds or 0.0) for v in versions)
    aged = f"{oldest:,.0f} steps" + (f" ({duration(seconds)})" if seconds else "")
    return Finding(
        Level.NEUTRAL,
        f"Pre-training searched {len(versions)} versions of the index; none was in use "
        f"beyond an age of {aged}.",
    )


def _measured_difference(interval: Interval) -> str:
    return (
        f"{points(interval.mean)} points, 95% interval {points(interval.low)} to "
        f"{points(interval.high)}"
    )
