"""The loop that keeps one slice per role until the role is done.

Each pass observes the current state and takes the next action, so that a lost response,
a launcher that died, or a slice deleted by someone else needs no special case.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from realm_jax.errors import BadInputError, NoAccessError, StoppedError
from realm_jax.storage import Store, UnavailableStoreError
from tpu_launch import diagnosis, operations, worker_state
from tpu_launch.attempts import DEFAULT_CURRENCY, Attempt, Attempts, TakenOverError
from tpu_launch.backends.backend import (
    Backend,
    BusyError,
    FoundSlice,
    QuotaError,
    SliceState,
)
from tpu_launch.clock import Clock, Unchanged
from tpu_launch.deleting import GaveUpError, delete_all, found_in
from tpu_launch.job import BUILDER, TRAINER, Job, Role, resource_name
from tpu_launch.operations import DeleteSlice, ShipBundle
from tpu_launch.progress import of_role as progress_of
from tpu_launch.worker_state import WorkerState

_FIRST_LOOK_SECONDS = 5.0
_FIRST_RETRY_SECONDS = 5.0
_LAST_RETRY_SECONDS = 300.0
_ACCESS_SECONDS = 1800.0
# Polls, and seconds, up to which a time in which nothing was seen counts as silence.
_LOOKS_MISSED, _SHORTEST_GAP_SECONDS = 4, 60.0


@dataclasses.dataclass
class _Progress:
    """State of the loop for a role.

    Attributes:
      attempt: the current attempt, or None between two.
      created: whether its creation was confirmed.
      ending: why it is ending, once it is.
      state: last known state of its slices.
      since: time at which they entered that state.
      step: the latest step ever reported.
      failed_at: place of the last failure, or "".
      attempts: number of attempts that this launcher began.
      fruitless: number of attempts in a row without progress.
      retries: number of errors of the service in a row.
      not_before: time until which nothing is done for this role.
      done: whether its marker exists.
    """

    attempt: Attempt | None = None
    created: bool = False
    ending: diagnosis.Diagnosis | None = None
    state: SliceState | None = None
    since: float = 0.0
    step: int = -1
    failed_at: str = ""
    attempts: int = 0
    fruitless: int = 0
    retries: int = 0
    not_before: float = 0.0
    done: bool = False


class Reconciler:
    """Runs a job to its end; see `run`."""

    def __init__(
        self,
        job: Job,
        bundle: ShipBundle,
        backend: Backend,
        store: Store,
        clock: Clock,
        say: Callable[[str], None],
        prices: Mapping[str, float | None],
        currency: str = DEFAULT_CURRENCY,
    ):
        """Takes the run from the launcher that had it before.

        Args:
          job: the run.
          bundle: its code, which is already in the model directory.
          backend: executes operations.
          store: the model directory.
          clock: the clock.
          say: prints messages.
          prices: hourly price of the slices by role, for the records.
          currency: currency of the prices.
        """
        self._job, self._bundle = job, bundle
        self._backend, self._store = backend, store
        self._clock, self._say = clock, say
        self._prices, self._currency = prices, currency
        self._until = operations.deadline(job, clock.now())
        self._attempts = Attempts(store, job.run, clock.now(), job.total_steps)
        self._progress = {role.name: _Progress() for role in job.roles}
        for name, progress in self._progress.items():
            progress.attempt = self._attempts.unended(name)
            progress.created = progress.attempt is not None
            progress.since = clock.now()
        gap = max(_SHORTEST_GAP_SECONDS, _LOOKS_MISSED * job.config.poll_seconds)
        self._unchanged = Unchanged(gap)
        self._reached: dict[str, tuple[object, ...]] = {}
        self._seen: list[FoundSlice] = []
        self._refused: float | None = None

    def run(self) -> None:
        """Runs until every role is done; deletes all slices, however it ends.

        Raises:
          GaveUpError: the deadline was reached, a failure repeats, or there were too
            many attempts.
          BadInputError: the workers refuse their input, or the service the request.
          NoAccessError: access has been refused for half an hour.
          StoppedError: asked to stop.
          TakenOverError: another launcher has the run; nothing was deleted.
        """
        ours, reason = True, "done"
        try:
            while not self._pass():
                if self._clock.wait(self._job.config.poll_seconds):
                    raise StoppedError(
                        "stopped; the same command resumes from the last checkpoint"
                    )
        except TakenOverError:
            ours = False
            raise
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            if ours:
                self._end(reason)

    def _pass(self) -> bool:
        """Makes one pass over all roles; returns whether all are done."""
        if self._clock.now() >= self._until:
            raise GaveUpError(
                f"the deadline of {self._job.config.deadline_hours:g} hours has come; "
                "the same command resumes from the last checkpoint"
            )
        try:
            self._attempts.require_ours()
            self._seen = self._find()
            self._tend_all({one.name: one for one in self._seen})
        except (BusyError, UnavailableStoreError) as error:
            self._say(f"waiting: {error}")
            return False
        except NoAccessError as error:
            self._await_access(error)
            return False
        self._refused = None
        return all(
            progress.done and progress.attempt is None
            for progress in self._progress.values()
        )

    def _await_access(self, error: NoAccessError) -> None:
        """Says once that access is refused; raises the error after half an hour."""
        now = self._clock.now()
        if self._refused is None:
            self._refused = now
            minutes = _ACCESS_SECONDS / 60
            self._say(f"waiting up to {minutes:.0f} minutes for access: {error}")
        elif now - self._refused >= _ACCESS_SECONDS:
            raise error

    def _tend_all(self, found: Mapping[str, FoundSlice]) -> None:
        for role in self._job.roles:
            progress = self._progress[role.name]
            if self._clock.now() < progress.not_before:
                continue
            try:
                self._tend(role, progress, found)
                progress.retries = 0
            except QuotaError as error:
                self._postpone(role, progress, self._job.config.quota_seconds, error)
            except (BusyError, UnavailableStoreError) as error:
                seconds = _FIRST_RETRY_SECONDS * 2 ** min(progress.retries, 10)
                seconds = min(seconds, _LAST_RETRY_SECONDS)
                progress.retries += 1
                self._postpone(role, progress, seconds, error)

    def _find(self) -> list[FoundSlice]:
        labels = {operations.RUN: self._job.run}
        return found_in(self._backend, self._job.zones, labels)

    def _tend(
        self, role: Role, progress: _Progress, found: Mapping[str, FoundSlice]
    ) -> None:
        """Takes the next action for a role."""
        if not progress.done:
            marker = worker_state.read_done(self._store, self._job.run, role.name)
            progress.done = marker is not None
            if progress.done:
                self._say(f"{role.name}: done")
        name = self._name(role, progress.attempt)
        if self._delete_others(role, name, found):
            return
        if progress.attempt is None:
            if not progress.done:
                self._begin(role, progress)
            return
        here = found.get(name) or self._backend.state(name, role.zone)
        # If the slice is of another run, the request to create ours reports it.
        if here is None or here.labels.get(operations.RUN) != self._job.run:
            self._missing(role, progress, name)
            return
        progress.created = True
        self._note_state(role, progress, here, name)
        if progress.ending is None:
            progress.ending = self._judge(role, progress, here)
        if progress.ending is None:
            return
        if here.state != SliceState.DELETING:
            self._say(f"{role.name}: deleting {name} ({progress.ending.reason})")
            self._backend.delete(DeleteSlice(name, role.zone))

    def _delete_others(
        self, role: Role, name: str, found: Mapping[str, FoundSlice]
    ) -> bool:
        """Deletes slices of the role's other attempts; returns whether any exist."""
        others = [
            one
            for one in found.values()
            if one.labels.get(operations.ROLE) == role.name and one.name != name
        ]
        for one in others:
            if one.state != SliceState.DELETING:
                self._say(f"{role.name}: deleting {one.name} (of no present attempt)")
                self._backend.delete(DeleteSlice(one.name, one.zone))
        return bool(others)

    def _begin(self, role: Role, progress: _Progress) -> None:
        config = self._job.config
        if progress.attempts >= config.max_attempts:
            raise GaveUpError(
                f"{role.name}: {progress.attempts} attempts, and not done; raise "
                "hardware.LaunchConfig.max_attempts to go on from the last checkpoint"
            )
        now = self._clock.now()
        price = self._prices.get(role.name)
        progress.attempt = self._attempts.begin(role.name, now, price, self._currency)
        progress.attempts += 1
        progress.created, progress.ending = False, None
        progress.state, progress.since = None, now
        self._create(role, progress)

    def _create(self, role: Role, progress: _Progress) -> None:
        assert progress.attempt is not None
        number, now = progress.attempt.number, self._clock.now()
        operation = operations.create_slice(
            self._job, role, number, self._bundle, now, self._until
        )
        self._backend.create(operation)
        progress.created, progress.since = True, now
        self._say(
            f"{role.name}: asked for {role.slices} x {operation.accelerator_type} "
            f"({operation.name}, {operation.provisioning})"
        )

    def _missing(self, role: Role, progress: _Progress, name: str) -> None:
        """Handles a current attempt whose slices do not exist."""
        if progress.ending is None and not progress.done:
            if not progress.created:
                self._create(role, progress)
                return
            if self._clock.now() - progress.since < self._job.config.settling_seconds:
                return
        reason = progress.ending or diagnosis.Lost("gone, nobody knows why")
        self._ended(role, progress, reason)

    def _ended(
        self, role: Role, progress: _Progress, reason: diagnosis.Diagnosis
    ) -> None:
        """Records that an attempt's slices are gone; schedules the next attempt."""
        assert progress.attempt is not None
        now = self._clock.now()
        said = "done" if progress.done else reason.reason
        self._attempts.end(role.name, progress.attempt, now, said)
        progress.attempt, progress.ending = None, None
        config = self._job.config
        seconds = config.backoff_seconds * 2 ** min(progress.fruitless, 20)
        seconds = min(seconds, config.max_backoff_seconds)
        if isinstance(reason, diagnosis.Lost) and reason.quota:
            seconds = config.quota_seconds
        progress.fruitless += 1
        if not progress.done:
            progress.not_before = now + seconds
            self._say(f"{role.name}: lost ({said}); again in {seconds:.0f} s")

    def _note_state(
        self, role: Role, progress: _Progress, here: FoundSlice, name: str
    ) -> None:
        if here.state != progress.state:
            now = self._clock.now()
            if here.state == SliceState.ACTIVE and progress.attempt:
                self._attempts.activate(role.name, progress.attempt, now)
            progress.state, progress.since = here.state, now
            if progress.attempt:
                self._attempts.note_slices(role.name, progress.attempt, here.state, now)
            self._say(f"{role.name}: {name} is {here.state}")

    def _judge(
        self, role: Role, progress: _Progress, here: FoundSlice
    ) -> diagnosis.Diagnosis | None:
        if progress.done:
            return diagnosis.Lost("done")
        assert progress.attempt is not None
        now, config = self._clock.now(), self._job.config
        run, number = self._job.run, progress.attempt.number
        workers = worker_state.read_workers(self._store, run, role.name, number)
        step = diagnosis.last_step(workers)
        if step > progress.step:
            progress.step, progress.fruitless = step, 0
        found = diagnosis.of_slices(here, role, progress.since, now, config)
        if found is None and here.state == SliceState.ACTIVE:
            found = diagnosis.of_workers(
                workers, self._silent(role, number, workers), config
            )
            found = found or self._stalled(role, progress, workers)
        if isinstance(found, diagnosis.BadInput):
            raise BadInputError(f"{role.name}, {found.reason}")
        if isinstance(found, diagnosis.Failure):
            if progress.failed_at == found.place:
                raise GaveUpError(
                    f"{role.name} failed twice at {found.place}, and was not "
                    f"preempted: {found.reason}"
                )
            progress.failed_at = found.place
        return found

    def _silent(
        self, role: Role, attempt: int, workers: Mapping[int, WorkerState]
    ) -> list[float]:
        """Returns the seconds since the last new report of each worker."""
        now = self._clock.now()
        return [
            self._unchanged.seconds((role.name, attempt, n), workers.get(n), now)
            for n in range(role.num_workers)
        ]

    def _stalled(
        self, role: Role, progress: _Progress, workers: Mapping[int, WorkerState]
    ) -> diagnosis.Failure | None:
        """Diagnoses a role whose workers report, and get no further.

        A builder that waits is not stalled; nor is a trainer while its builder has no
        slices yet, or embeds.
        """
        assert progress.attempt is not None
        far = progress_of(self._store, role.name)
        number, step = progress.attempt.number, diagnosis.last_step(workers)
        self._reached[role.name] = (number, step, far.step, far.reached)
        value, is_waiting = self._reached[role.name], far.is_waiting
        beside = self._progress.get(BUILDER)
        if role.name == TRAINER and beside is not None:
            value += self._reached.get(BUILDER, ())
            is_waiting = not beside.done and beside.state != SliceState.ACTIVE
        if is_waiting:
            self._unchanged.forget(role.name)
        minutes = self._job.config.stalled_minutes
        if self._unchanged.seconds(role.name, value, self._clock.now()) > 60 * minutes:
            place = far.reached or f"step {step}"
            return diagnosis.Failure(f"no progress for {minutes:g} minutes", place)
        return None

    def _postpone(
        self, role: Role, progress: _Progress, seconds: float, error: Exception
    ) -> None:
        progress.not_before = self._clock.now() + seconds
        self._say(f"{role.name}: {error}; again in {seconds:.0f} s")

    def _name(self, role: Role, attempt: Attempt | None) -> str:
        if attempt is None:
            return ""
        return resource_name(self._job.run, role.name, attempt.number)

    def _end(self, reason: str) -> None:
        """Deletes every slice of the run, and records that they are gone and why."""
        now, config = self._clock.now(), self._job.config
        # If the response to a creation was lost, the slice may yet appear.
        unsure = any(
            progress.attempt and not progress.created
            for progress in self._progress.values()
        )
        delete_all(
            self._backend,
            self._find,
            self._clock,
            self._say,
            now + config.settling_seconds if unsure else now,
            first_look=min(_FIRST_LOOK_SECONDS, config.poll_seconds),
            known=self._seen,
        )
        # A failure to write the records must not hide how the run ended.
        with contextlib.suppress(OSError, BadInputError):
            self._attempts.close(self._clock.now(), reason)
