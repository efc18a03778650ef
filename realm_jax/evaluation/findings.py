"""Summarises the results of a run, in numbers and in sentences."""

import itertools
from collections.abc import Iterator

from realm_jax.evaluation.answer_errors import Overlap
from realm_jax.evaluation.comparisons import (
    AFTER_FINETUNING,
    AFTER_REALM,
    AFTER_WARM_START,
    BM25,
    EXACT_MATCH,
    F1,
    MOMENTS,
    ControlComparison,
    ControlFigure,
    MaskedAccuracy,
    fused_name,
    recall_name,
)
from realm_jax.evaluation.report_data import (
    BestCheckpoint,
    ChosenCheckpoint,
    ReportData,
)
from realm_jax.evaluation.templates import duration, nats, percent, points, span
from realm_jax.metrics.curves import (
    Finding,
    IndexVersion,
    Level,
    index_versions,
    made_at,
)
from realm_jax.metrics.retrieval import Interval

_MOST_RETRIEVED = 100
"""The largest k of recall@k in `run.RECALL_AT`."""
_COLLAPSED = (
    "See the curves: a collapse calls for more frequent refreshes and a lower rate, a "
    "slow decline for fewer steps."
)
_NOT_FOUND = (
    "Check that the answers are spelled as in the text, that their articles are in the "
    "corpus, and that titles of questions are those of articles."
)


def tiles(data: ReportData) -> list[tuple[str, str, str]]:
    """Returns title, value and details of each of the most important numbers."""
    found = []
    find, questions = data.comparison.find, data.run.questions
    before = find(AFTER_WARM_START, recall_name(5))
    if after := find(AFTER_REALM, recall_name(5)):
        detail = f"was {percent(before.mean)} before it" if before else span(after)
        detail = f"of {after.count:,} {questions}; {detail}"
        found.append(("Recall@5 after REALM", percent(after.mean), detail))
    f1 = find(AFTER_FINETUNING, F1)
    if answered := find(AFTER_FINETUNING, EXACT_MATCH):
        detail = f"of {answered.count:,} {questions}; {span(answered)}"
        detail += f"; F1 {percent(f1.mean)}" if f1 else ""
        found.append(("Answered exactly", percent(answered.mean), detail))
    if masked := data.masked_accuracy:
        detail = (
            f"of {masked.utility.count:,} sentences of the validation split; "
            f"{percent(masked.null_only.mean)} without documents; utility "
            f"{nats(masked.utility.mean)} nats"
        )
        right = percent(masked.with_retrieval.mean)
        found.append(("Masked spans right", right, detail))
    if refreshes := len(index_versions(data.curves)):
        detail = f"of {data.run.corpus.num_blocks:,} blocks"
        found.append(("Index versions used", str(refreshes), detail))
    return found


def verdicts(data: ReportData) -> list[Finding]:
    """Returns a finding for every comparison: better, worse or no difference.

    A difference with an interval that includes zero is not measurable.
    """
    found = [*_pretraining(data)]
    if data.control:
        found += _control(data.control, data.run.questions)
    if data.masked_accuracy:
        found.append(_masked_spans(data.masked_accuracy))
    if data.best_checkpoint:
        found.append(_best_checkpoint(data.best_checkpoint))
    found += _answers(data)
    if data.finetuned_checkpoint:
        found.append(_chosen_checkpoint(data.finetuned_checkpoint))
    if versions := index_versions(data.curves):
        found.append(_refreshes(versions))
    return found


def _side(difference: Interval) -> Level:
    """Returns on which side of zero an interval lies."""
    if difference.low > 0:
        return Level.GOOD
    return Level.WARNING if difference.high < 0 else Level.NEUTRAL


def _measured(difference: Interval) -> str:
    return f"{points(difference.mean)} points, 95% interval {span(difference, points)}"


def _pretraining(data: ReportData) -> Iterator[Finding]:
    find, name = data.comparison.find, recall_name(5)
    before, after = find(AFTER_WARM_START, name), find(AFTER_REALM, name)
    change = data.comparison.find_change(AFTER_WARM_START, AFTER_REALM, name)
    if before and after and change:
        side = _side(change)
        changed = {
            Level.GOOD: "raised",
            Level.WARNING: "lowered",
            Level.NEUTRAL: "made no measurable difference to",
        }[side]
        yield Finding(
            side,
            f"REALM pre-training {changed} {name}: {percent(before.mean)} after the "
            f"warm start, {percent(after.mean)} after REALM ({_measured(change)}, "
            f"{change.count:,} {data.run.questions}).",
            _COLLAPSED if side is Level.WARNING else "",
        )


def _control(control: ControlComparison, questions: str) -> Iterator[Finding]:
    """Yields what REALM gained and lost, by recall@5 and exact match."""
    wanted = itertools.product(MOMENTS.values(), (recall_name(5), EXACT_MATCH))
    found = [figure for key in wanted if (figure := control.find(*key))]
    if found:
        sides = {_side(figure.difference) for figure in found}
        order = (Level.WARNING, Level.GOOD, Level.NEUTRAL)
        *first, last = map(_against, found)
        together = f"{', '.join(first)} and {last}" if first else last
        yield Finding(
            next(level for level in order if level in sides),
            f"On the same {found[0].difference.count:,} {questions}, compared with the "
            f"same chain without it, REALM {together}.",
        )


def _against(figure: ControlFigure) -> str:
    difference, what = figure.difference, figure.metric
    if what != EXACT_MATCH:
        what = f"{what} {figure.moment}"
    changed = {Level.GOOD: "gained", Level.WARNING: "lost"}.get(_side(difference))
    if changed is None:
        return f"made no measurable difference to {what} ({_measured(difference)})"
    return (
        f"{changed} {100 * abs(difference.mean):.1f} points of {what} (95% interval "
        f"{span(difference, points)})"
    )


def _masked_spans(accuracy: MaskedAccuracy) -> Finding:
    """Judges by the utility, more informative than accuracy if most spans are wrong."""
    utility = accuracy.utility
    side = _side(utility)
    changed = {
        Level.GOOD: "help to fill in masked spans",
        Level.WARNING: "make filling in masked spans worse",
        Level.NEUTRAL: "make no measurable difference to masked spans",
    }[side]
    return Finding(
        side,
        f"Documents {changed}: {nats(utility.mean)} nats of log-probability over the "
        f"null document alone (95% interval {span(utility, nats)}, {utility.count:,} "
        f"spans of the validation split); {percent(accuracy.with_retrieval.mean)} "
        f"right against {percent(accuracy.null_only.mean)} "
        f"({_measured(accuracy.difference)}).",
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


def _answers(data: ReportData) -> Iterator[Finding]:
    """Yields how many questions were answered, and why if none can be."""
    find, questions = data.comparison.find, data.run.questions
    f1 = find(AFTER_FINETUNING, F1)
    if answered := find(AFTER_FINETUNING, EXACT_MATCH):
        and_f1 = f"; F1 {percent(f1.mean)} ({span(f1)})" if f1 else ""
        yield Finding(
            Level.NEUTRAL,
            f"The fine-tuned reader answers {percent(answered.mean)} of "
            f"{answered.count:,} {questions} exactly right (95% interval "
            f"{span(answered)}){and_f1}.",
        )
    if errors := data.errors:
        yield Finding(
            Level.NEUTRAL,
            "No block that was read has an answer to "
            f"{percent(errors.retriever.mean)} of the questions "
            f"({span(errors.retriever)}); the reader misses it in "
            f"{percent(errors.wrong_span.mean)} and prefers a block without one in "
            f"{percent(errors.wrong_block.mean)}.",
        )
    for other, change in (
        (BM25, "With the retriever's blocks in place of BM25's"),
        (fused_name(AFTER_FINETUNING), "Without BM25's scores beside the retriever's"),
    ):
        if gain := data.same_reader.find_change(other, AFTER_FINETUNING, EXACT_MATCH):
            yield Finding(
                _side(gain),
                f"{change}, exact match of the same reader differs by "
                f"{_measured(gain)}.",
            )
    seen = {row.label: row.metrics for row in data.overlaps}.get(Overlap.QUESTION.value)
    if seen:
        count = seen[EXACT_MATCH].count
        yield Finding(
            Level.WARNING,
            f"{count:,} of the {questions} {'was' if count == 1 else 'were'} trained "
            "on, word for word.",
            "Exact match on them measures memory; take them out of one of the splits.",
        )
    name = recall_name(_MOST_RETRIEVED)
    recall = find(AFTER_FINETUNING, name)
    if recall and recall.mean == 0:
        yield Finding(
            Level.WARNING,
            f"None of {recall.count:,} {questions} has an answer in the "
            f"{_MOST_RETRIEVED} blocks retrieved for it ({name} 0%), so the reader "
            "could not find it.",
            _NOT_FOUND,
        )


def _chosen_checkpoint(chosen: ChosenCheckpoint) -> Finding:
    text = f"The fine-tuned reader is that of step {chosen.step:,}"
    held_out = "on the questions that fine-tuning held out"
    right = percent(chosen.exact_match)
    if chosen.step == chosen.last_step:
        text += f", the last checkpoint ({right} exact match {held_out})."
        return Finding(Level.NEUTRAL, text)
    return Finding(
        Level.NEUTRAL,
        f"{text}, chosen by exact match {held_out}: {right}, and "
        f"{percent(chosen.last_exact_match)} at the last step, {chosen.last_step:,}.",
        'FINETUNED_CHECKPOINT="last" measures that one.',
    )


def _refreshes(versions: list[IndexVersion]) -> Finding:
    if len(versions) == 1:
        return Finding(
            Level.NEUTRAL,
            "The index was never replaced during pre-training: every step searched "
            f"the one made {made_at(versions[0].step)}.",
        )
    oldest = max(version.oldest_steps or 0.0 for version in versions)
    seconds = max(version.oldest_seconds or 0.0 for version in versions)
    aged = f"{oldest:,.0f} steps" + (f" ({duration(seconds)})" if seconds else "")
    return Finding(
        Level.NEUTRAL,
        f"Pre-training searched {len(versions)} versions of the index; none was in use "
        f"beyond an age of {aged}.",
    )
