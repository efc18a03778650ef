"""Measures what choosing fine-tuning's checkpoint by exact match on dev is worth.

    python -m bench.checkpoint_choice RUN --questions QUESTIONS --steps 50 200 \
        --output docs/figures/checkpoint_choice.json --page docs/results.md

RUN is a finished quickstart, whose pre-trained model is fine-tuned again, for each
number of updates and each seed, as the quickstart does it. The best checkpoint by exact
match on the split dev is compared with the last, on the same test questions. Runs that
are there are not repeated, so that an interrupted bench goes on.
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import read_questions
from realm_jax.errors import BadInputError
from realm_jax.evaluation.loading import FinetunedModel
from realm_jax.evaluation.open_qa import evaluate_open_qa
from realm_jax.evaluation.recorded import answering_config, find_model
from realm_jax.evaluation.templates import percent, points
from realm_jax.index.embed import EmbedConfig
from realm_jax.metrics.retrieval import (
    bootstrap_interval,
    paired_bootstrap_difference,
)
from realm_jax.training.checkpoint_manifests import DEV_EXACT_MATCH, Which

_MEASUREMENTS = 8
"""How often a run is measured on dev."""


def fine_tune(
    run: pathlib.Path, questions: str, folder: pathlib.Path, steps: int, seed: int
) -> None:
    """Fine-tunes the pre-trained model of a quickstart, or goes on doing so."""
    files = ("models/minilm_l6", "hardware/cpu", "runs/finetune", "runs/quickstart")
    settings = {
        "MODEL_DIR": folder,
        "CORPUS": run / "corpus",
        "TASK": "vital_questions",
        "WARM_START": run / "pretrain",
        "QUESTIONS": questions,
        "SEED": seed,
        "finetune/TRAIN_STEPS": steps,
        "finetune/EVALUATION_PERIOD": max(1, steps // _MEASUREMENTS),
        "finetune/CHECKPOINT_PERIOD": steps,
    }
    command = [
        *(sys.executable, "-m", "realm_jax.cli.main", "finetune"),
        *(f"--gin_file=gin/{name}.gin" for name in files),
        *(f"--gin.{name}={value}" for name, value in settings.items()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInputError(
            f"expected realm finetune to end in {folder}, got exit code "
            f"{done.returncode}: {done.stderr.strip().splitlines()[-1]}"
        )


def answers(
    folder: pathlib.Path, questions: str, which: Which
) -> tuple[int, float, np.ndarray]:
    """Returns step and dev exact match of a checkpoint, and its exact match on test."""
    recorded = find_model(folder)
    corpus = BlockStore.open(recorded.trained.corpus)
    model = FinetunedModel.open(
        answering_config(recorded),
        corpus,
        searcher="device",
        embed=EmbedConfig(),
        checkpoint=which,
    )
    answered = evaluate_open_qa(
        model.corpus_search(corpus, model.index(corpus)),
        read_questions(questions, "test"),
    )
    return model.run.step, model.run.details[DEV_EXACT_MATCH], answered.exact_match


def compare(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns for each number of updates what the two checkpoints reached."""
    results = []
    for steps in flags.steps:
        chosen = []
        by_question: dict[Which, list[np.ndarray]] = {which: [] for which in Which}
        for seed in range(flags.seeds):
            folder = flags.work / f"{steps}-{seed}"
            fine_tune(flags.run, flags.questions, folder, steps, seed)
            for which in Which:
                step, dev, test = answers(folder, flags.questions, which)
                by_question[which].append(test)
                chosen.append([which.value, seed, step, dev, float(test.mean())])
                print(steps, chosen[-1], flush=True)
        best, last = (
            np.mean(by_question[which], axis=0) for which in (Which.BEST, Which.LAST)
        )
        results.append(
            {
                "steps": steps,
                "checkpoints": chosen,
                "best": dataclasses.asdict(bootstrap_interval(best)),
                "last": dataclasses.asdict(bootstrap_interval(last)),
                "difference": dataclasses.asdict(
                    paired_bootstrap_difference(last, best)
                ),
            }
        )
    return results


def rows(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a row for each number of updates."""
    for result in results:
        difference = result["difference"]
        steps = [str(c[2]) for c in result["checkpoints"] if c[0] == Which.BEST.value]
        yield [
            str(result["steps"]),
            ", ".join(steps),
            *(_with_interval(result[name], percent) for name in ("last", "best")),
            _with_interval(difference, points),
        ]


def _with_interval(found: Mapping[str, float], show: Any) -> str:
    return f"{show(found['mean'])} [{show(found['low'])}, {show(found['high'])}]"


def main() -> None:
    """Fine-tunes and measures, and prints the table."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("run", type=pathlib.Path, help="a finished quickstart")
    parser.add_argument("--questions", required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--work", type=pathlib.Path, default=pathlib.Path("runs/checkpoint_choice")
    )
    flags = parser.parse_args()
    with reporting("checkpoint_choice", flags):
        results = compare(flags)
        heads = ["updates", "of the best, by seed", "last", "best on dev", "difference"]
        command = command_line(
            "checkpoint_choice", {"RUN": flags.run, "QUESTIONS": flags.questions}
        )
        text = (
            f"    {command}\n\n{machine()}, {today()}; exact match on the test "
            f"questions, means of {flags.seeds} seeds.\n\n"
            f"{table(heads, rows(results))}\n"
        )
        publish("checkpoint_choice", text, results, flags)


if __name__ == "__main__":
    main()
