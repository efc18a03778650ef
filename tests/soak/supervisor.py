"""Kills trainer and builder at random moments, and starts them again at once."""

import dataclasses
import itertools
import random
import signal
import time
from collections.abc import Sequence

from realm_jax.index.builder import BUILDER_ROLE
from realm_jax.index.heartbeat import read_heartbeat
from realm_jax.storage import open_store
from tests.soak.fork_server import Fault, ForkServer
from tests.soak.invariant_checker import InvariantChecker
from tests.soak.jobs import Job, Run

# Twice as long as the whole takes on a busy machine.
_PATIENCE_SECONDS = 3600.0
_LOOK_SECONDS = 0.05
_BUSY_SECONDS = 5.0
_MOMENT_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Kills:
    """How often each is killed, and the seed of when."""

    seed: int
    builder: int
    trainer: int

    def moments(self, steps: int) -> list[tuple[int, str]]:
        """(trainer's step, who), each kill somewhere in a stretch of its own."""
        rng = random.Random(self.seed)
        found = []
        for who, count in (("builder", self.builder), ("trainer", self.trainer)):
            for i in range(count):
                found.append((int(steps * 0.95 * (i + rng.random()) / count), who))
        return sorted(found)


def run_to_the_end(
    run: Run,
    fork_server: ForkServer,
    kills: Kills | None = None,
    *,
    num_builders: int = 1,
) -> InvariantChecker:
    """Runs the trainer (and builders, in async) to the end; the checker looks on."""
    checker = InvariantChecker(run)
    jobs = {"trainer": Job("pretrain", run, fork_server)}
    checker.begins(jobs["trainer"])
    if run.mode == "async":
        for number in range(num_builders):
            name = f"builder {number}" if number else "builder"
            jobs[name] = Job("build-index", run, fork_server)
    store = open_store(run.model_dir)
    beating = set()
    moments = kills.moments(run.steps) if kills else []
    rng = random.Random(kills.seed if kills else 0)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(job.has_ended for job in jobs.values()):
        assert time.monotonic() < deadline, f"at step {checker.step}"
        checker.look()
        if (status := read_heartbeat(store, BUILDER_ROLE)) is not None:
            beating.add(status.pid)
        if moments and checker.step >= moments[0][0]:
            _, who = moments.pop(0)
            _wait_for_a_moment(run, rng, checker, jobs, who)
            if jobs[who].kill():
                jobs[who].start()
                if who == "trainer":
                    checker.begins(jobs[who])
        if jobs["trainer"].has_ended and checker.is_up_to_date():
            # A builder that was started after that would wait for another trainer. It
            # can be asked once it beats, and has collected what its last life left.
            for name in jobs.keys() - {"trainer"}:
                if jobs[name].pid in beating:
                    jobs[name].ask_to_end()
        time.sleep(_LOOK_SECONDS)
    checker.look()
    assert not moments, f"it ended before {moments}"
    return checker


def faults(seed: int, count: int, run: Run) -> list[Fault]:
    """Half of them SIGKILL, half SIGTERM, in random order, at steps that differ.

    Half of them come between two steps, and half a moment later: while the next is
    computed, the corpus embedded or a checkpoint written.
    """
    rng = random.Random(seed)
    signals = [signal.SIGKILL, signal.SIGTERM] * -(-count // 2)
    rng.shuffle(signals)
    steps = sorted(rng.sample(range(1, int(run.steps * 0.9)), count))
    return [
        Fault(
            step,
            int(number),
            rng.choice([0.0, rng.uniform(0.001, _MOMENT_SECONDS)]),
            rng.randrange(run.processes),
        )
        for step, number in zip(steps, signals, strict=False)
    ]


def run_through(
    run: Run, fork_server: ForkServer, injected: Sequence[Fault] = ()
) -> InvariantChecker:
    """Runs the trainer to the end, which kills itself once in each of its lives."""
    lives = [*injected, None]
    job = Job("pretrain", run, fork_server, lives[0])
    for fault, following in itertools.pairwise(lives):
        job.wait_for(fault)
        job.start(following)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not job.has_ended:
        assert time.monotonic() < deadline
        time.sleep(_LOOK_SECONDS)
    return InvariantChecker(run)


def _wait_for_a_moment(
    run: Run,
    rng: random.Random,
    checker: InvariantChecker,
    jobs: dict[str, Job],
    who: str,
) -> None:
    """Half of the time anywhere, else amid the work."""
    deadline = time.monotonic() + rng.choice([0.0, _BUSY_SECONDS])
    store = open_store(run.model_dir)
    while time.monotonic() < deadline:
        checker.look()
        if who == "trainer":
            if checker.step > 0:
                break
        else:
            status = read_heartbeat(store, BUILDER_ROLE)
            mine = status is not None and status.pid == jobs[who].pid
            if mine and status.extra.get("activity") == "embedding":
                break
    time.sleep(rng.uniform(0.0, 0.5))
