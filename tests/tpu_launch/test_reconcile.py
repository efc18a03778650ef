"""A run on a service that loses answers, slices and patience; the client is real."""

import random
import shutil
from collections import Counter

import pytest
from google.auth.exceptions import RefreshError

from realm_jax.errors import BadInputError, NoAccessError, StoppedError
from realm_jax.index.heartbeat import Heartbeat
from realm_jax.storage import UnavailableStoreError
from tests.tpu_launch import launching
from tests.tpu_launch.fake_tpu import random_faults, served
from tpu_launch import worker_state
from tpu_launch.attempts import Attempts, TakenOverError, read_attempt
from tpu_launch.backends.gcloud import GcloudBackend
from tpu_launch.deleting import GaveUpError
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.reconcile import Reconciler
from tpu_launch.worker_state import State, WorkerState

PRICES = {TRAINER: 3.0, BUILDER: 1.0}


def reconciler(world, backend, job=None, said=None):
    say = [].append if said is None else said.append
    job = job or launching.job()
    return Reconciler(job, launching.BUNDLE, backend, world.store, world, say, PRICES)


def attempts(world):
    """How many attempts of each role had slices."""
    return Counter(name.split("-")[-2] for name in world.creations)


def require_clean(world):
    """What holds after every run, however it went."""
    assert world.resources == {}
    assert set(world.creations.values()) <= {1}
    assert world.most_live <= 1


def test_a_run_that_nothing_happens_to(world, backend):
    job = launching.job()
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}
    for role in (TRAINER, BUILDER):
        assert worker_state.read_done(world.store, job.run, role).step == world.steps
        attempt = read_attempt(world.store, job.run, role, 1)
        assert attempt.price == PRICES[role]
        # In the queue, and until it was gone.
        assert 90 < attempt.active - attempt.begun < 180
        assert 600 < attempt.ended - attempt.active < 1000


def test_a_role_that_is_done_costs_nothing_while_the_other_works(world, backend):
    alone = []

    def watch(world):
        names = "".join(world.resources)
        alone.extend([world.time] if TRAINER not in names and BUILDER in names else [])

    world.on_tick, world.steps_of = watch, {BUILDER: 300}
    reconciler(world, backend).run()
    require_clean(world)
    # 200 steps, ten in a minute.
    assert 800 < alone[-1] - alone[0] < 1500


@pytest.mark.parametrize("seed", range(3))
def test_preempted_twenty_times_and_asked_through_a_bad_line(world, backend, seed):
    """Preemptions at random, and every kind of fault in a fifth of the requests."""
    source, preempted = random.Random(seed), []

    def weather(world):
        for name in world.active():
            role = world.resources[name].labels["realm-role"]
            at_work = world.checkpoints.get(role, 0) < world.steps
            if at_work and len(preempted) < 20 and source.random() < 0.1:
                world.preempt(name)
                preempted.append(name)

    world.on_tick, world.fault = weather, random_faults(seed, 0.2)
    world.steps = 800
    job = launching.job(deadline_hours=100.0, quota_seconds=120.0, provisioning="spot")
    reconciler(world, backend, job).run()
    require_clean(world)
    assert len(preempted) == 20
    assert {TRAINER, BUILDER} == {name.split("-")[-2] for name in preempted}
    assert sum(attempts(world).values()) == len(set(preempted)) + 2
    kinds = {kind for *_, kind in world.requests}
    assert kinds >= {"", "429", "500", "503", "lost", "dropped"}
    for role in (TRAINER, BUILDER):
        assert worker_state.read_done(world.store, job.run, role).step == 800


@pytest.mark.parametrize("kind", ["lost", "dropped", "500", "503", "429"])
def test_a_creation_whose_answer_never_comes(world, backend, kind):
    tries = []

    def fault(method, path):
        if method == "POST":
            tries.append(path)
        return kind if method == "POST" and len(tries) <= 3 else ""

    world.fault = fault
    reconciler(world, backend, launching.job(builder="")).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1}
    posts = [query for method, _, query, *_ in world.requests if method == "POST"]
    assert len({query["requestId"] for query in posts}) == 1
    # What was lost was done: the next look finds it, and nothing is asked for again.
    assert len(posts) == (1 if kind == "lost" else 4)


def test_a_creation_that_is_asked_for_again_finds_its_own(world, backend):
    """The answer is lost, and then the listing does not know of it yet: 409."""
    posts = []

    def fault(method, path):
        posts.extend([path] if method == "POST" else [])
        if method == "POST":
            return "lost" if len(posts) == 1 else ""
        return "hidden" if len(posts) == 1 else ""

    answer = world.answer

    def forgetful(method, path, query, body):
        if fault_of(method) == "hidden":
            if path.endswith("/queuedResources"):
                return 200, {}
            return 404, {"error": {"code": 404, "status": "NOT_FOUND", "message": ""}}
        return answer(method, path, query, body)

    def fault_of(method):
        return "hidden" if method == "GET" and len(posts) == 1 else ""

    world.fault, world.answer = fault, forgetful
    reconciler(world, backend, launching.job(builder="")).run()
    require_clean(world)
    assert len(posts) == 2
    assert attempts(world) == {TRAINER: 1}


def test_somebody_elses_slice_of_our_name_is_not_taken(world, backend):
    job = launching.job(builder="")
    other = {"tpu": {"nodeSpec": [{"node": {"labels": {"owner": "somebody"}}}]}}
    path = "/v2/projects/p/locations/us-central2-b/queuedResources"
    query = {"queuedResourceId": f"{job.run}-trainer-001"}
    world.answer("POST", path, query, other)
    world.working = False
    said = []
    with pytest.raises(BadInputError, match="labels"):
        # It is there, so nothing is created; its label is not the run's.
        reconciler(world, backend, job, said).run()
    assert list(world.resources) == [f"{job.run}-trainer-001"]


def test_half_created_slices_are_deleted_and_asked_for_anew(world, backend):
    def spoil(world):
        for resource in world.resources.values():
            if resource.labels["realm-attempt"] in ("1", "2"):
                resource.fails = "1 of 2 nodes could not be created"

    world.on_tick = spoil
    said = []
    reconciler(world, backend, launching.job("v5litepod-64", "", 2), said).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 3}
    assert any("1 of 2 nodes" in line for line in said)


def test_a_quota_is_waited_for_slowly_and_said(world, backend):
    began = world.time

    def fault(method, path):
        return "quota" if method == "POST" and world.time < began + 3000 else ""

    world.fault = fault
    said = []
    reconciler(world, backend, launching.job(builder=""), said).run()
    require_clean(world)
    posts = [request for request in world.requests if request[0] == "POST"]
    # Once in ten minutes, not once in thirty seconds.
    assert len(posts) == 6
    assert any("TPUV4sPerProjectPerZone" in line for line in said)
    assert attempts(world) == {TRAINER: 1}


def test_what_the_service_refuses_ends_the_run_at_once(world, backend):
    world.fault = lambda method, path: "400" if method == "POST" else ""
    with pytest.raises(BadInputError, match="not supported here"):
        reconciler(world, backend).run()
    require_clean(world)
    assert len(world.requests) < 10


@pytest.mark.parametrize("kind", ["401", "403"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_access_that_is_refused_for_twenty_minutes_is_waited_for(
    world, backend, kind, method
):
    times, said = [], []

    def fault(asked, path):
        if asked != method or not (world.active() or times):
            return ""
        times.append(world.time)
        return kind if world.time < times[0] + 1200 else ""

    world.fault = fault
    reconciler(world, backend, launching.job(), said).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}
    assert sum("minutes for access" in line for line in said) == 1


def test_a_token_that_cannot_be_renewed_is_waited_for(world, backend, monkeypatch):
    began, find = world.time, backend.find

    def refused(zone, labels):
        if began + 300 < world.time < began + 1200:
            monkeypatch.setattr(backend._client, "list_queued_resources", no_token)
        else:
            monkeypatch.undo()
        return find(zone, labels)

    def no_token(**arguments):
        raise RefreshError("invalid_grant: Token has been expired or revoked.")

    backend.find = refused
    reconciler(world, backend).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


def test_access_that_stays_refused_ends_the_run_and_says_what_is_left(world, backend):
    world.steps = 10**6
    began = []

    def fault(method, path):
        began.extend([world.time] if len(world.active()) == 2 else [])
        return "401" if began else ""

    world.fault = fault
    job = launching.job()
    with pytest.raises(GaveUpError) as error:
        reconciler(world, backend, job).run()
    assert f"{job.run}-trainer-001, {job.run}-builder-001" in str(error.value)
    assert isinstance(error.value.__context__, NoAccessError)
    # Half an hour until the run is given up, and half an hour of deleting.
    assert 3600 <= world.time - began[0] < 3800


def test_a_bucket_that_refuses_for_twenty_minutes_is_waited_for(world, backend):
    began, read = world.time, world.store.read

    def refusing(name):
        if began + 300 < world.time < began + 1500 and name.endswith(".json"):
            raise NoAccessError("expected access to the bucket, got 401; log in")
        return read(name)

    world.steps, world.store.read = 300, refusing
    reconciler(world, backend).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


def test_a_refusal_to_delete_one_slice_does_not_keep_the_other(world, backend):
    """Until half an hour has passed; then it is named."""
    job = launching.job()
    world.fault = lambda method, path: (
        "400" if method == "DELETE" and "trainer" in path else ""
    )
    world.stop_at = world.time + 300
    with pytest.raises(GaveUpError, match=f"could not delete {job.run}-trainer-001 "):
        reconciler(world, backend, job).run()
    assert list(world.resources) == [f"{job.run}-trainer-001"]


def workers_say(world, job, role, **states):
    """Workers fail at a step as soon as their slice is there."""

    def tick(world):
        for name in world.active():
            resource = world.resources[name]
            attempt = int(resource.labels["realm-attempt"])
            said = WorkerState(time=world.time, **states)
            worker_state.write_worker(world.store, job.run, role, attempt, 1, said)

    world.working, world.on_tick = False, tick


def test_a_failure_that_repeats_at_its_step_ends_the_run(world, backend):
    job = launching.job(builder="")
    failed = {"state": State.FAILED, "step": 70, "exit_code": 1, "message": "KeyError"}
    workers_say(world, job, TRAINER, **failed)
    with pytest.raises(GaveUpError, match=r"twice at step 70.*worker 1: KeyError"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 2}


def test_failures_at_later_steps_do_not_end_it_but_the_cap_does(world, backend):
    job = launching.job(builder="", max_attempts=4)

    def tick(world):
        for name in world.active():
            attempt = int(world.resources[name].labels["realm-attempt"])
            said = WorkerState(
                State.FAILED, world.time, 10 * attempt, "", 139, "SIGSEGV"
            )
            worker_state.write_worker(world.store, job.run, TRAINER, attempt, 0, said)

    world.working, world.on_tick = False, tick
    with pytest.raises(GaveUpError, match="4 attempts"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 4}


def test_bad_input_is_never_tried_again(world, backend):
    job = launching.job(builder="")
    said = "expected a corpus at /data, found none; run realm prepare"
    bad = {"state": State.FAILED, "exit_code": 2, "message": said}
    workers_say(world, job, TRAINER, **bad)
    with pytest.raises(BadInputError, match=f"trainer, worker 1: {said}"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1}


def test_workers_that_never_say_anything_end_the_run(world, backend):
    world.working = False
    job = launching.job(builder="", startup_minutes=5.0)
    with pytest.raises(GaveUpError, match="8 of 8 workers said nothing"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 2}


def test_workers_that_fall_silent_are_lost(world, backend):
    """As of a preempted slice of which the service does not say so."""
    job = launching.job("v4-8", "", silence_minutes=5.0)
    world.steps = 40

    def tick(world):
        # The first attempt says its last word and stays ACTIVE.
        world.working = not any(name.endswith("-001") for name in world.running) or (
            world.checkpoints[TRAINER] < 20
        )

    world.on_tick = tick
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 2}
    assert read_attempt(world.store, job.run, TRAINER, 1).reason.startswith("1 of 1")


@pytest.mark.parametrize("ahead", [-900.0, 900.0])
def test_a_clock_of_the_workers_that_is_wrong_kills_nothing(world, backend, ahead):
    world.workers_ahead, world.steps = ahead, 300
    reconciler(world, backend).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


@pytest.mark.parametrize("begins", [0.0, 400.0])
def test_a_bucket_that_is_away_for_eleven_minutes_kills_nothing(world, backend, begins):
    """Neither can workers write then; as they start, and as they train."""
    job = launching.job(startup_minutes=5.0)
    away, read = [], world.store.read

    def is_away(seconds=660):
        away.extend([world.time] if len(world.active()) == 2 and not away else [])
        return away and begins <= world.time - away[0] < begins + seconds

    def reading(name):
        if is_away():
            raise UnavailableStoreError("away")
        return read(name)

    def tick(world):
        # They report every minute.
        world.working = not is_away(660 + 75)

    world.steps, world.on_tick, world.store.read = 300, tick, reading
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


def test_a_step_that_never_ends_is_tried_once_more_and_ends_the_run(world, backend):
    """Its worker reports every minute."""
    world.steps_per_minute, job = 0, launching.job(stalled_minutes=30.0)
    with pytest.raises(GaveUpError, match=r"failed twice at .*no progress for 30 min"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world)[TRAINER] == 2
    assert 3600 < world.time - 1_000_000 < 2 * 2400


def test_a_trainer_is_not_stalled_while_its_builder_is_queued_or_embeds(world, backend):
    began, job = world.time, launching.job(stalled_minutes=30.0)
    heartbeat = Heartbeat(world.store, "index_builder")

    def tick(world):
        hours = (world.time - began) / 3600
        world.steps_per_minute = 0 if hours < 4 else 10
        for resource in world.resources.values():
            if resource.labels["realm-role"] == BUILDER and hours < 2:
                resource.since = world.time
        if 2 < hours < 4:
            heartbeat.beat(0, activity="embedding", blocks_done=int(1000 * hours))

    world.on_tick = tick
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


def test_a_builder_that_waits_is_not_stalled_and_one_that_embeds_is(world, backend):
    began, job = world.time, launching.job(stalled_minutes=30.0)
    heartbeat = Heartbeat(world.store, "index_builder")

    def tick(world):
        activity = "waiting" if world.time < began + 7200 else "embedding"
        heartbeat.beat(40, activity=activity, blocks_done=7)

    world.steps_of, world.on_tick = {TRAINER: 2400, BUILDER: 0}, tick
    with pytest.raises(GaveUpError, match="builder failed twice at block 7 of the"):
        reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 2}
    assert 7200 + 3600 < world.time - began < 7200 + 2 * 2400


def test_the_deadline_deletes_everything(world, backend):
    world.steps = 10**6
    with pytest.raises(GaveUpError, match="deadline of 2 hours"):
        reconciler(world, backend, launching.job(deadline_hours=2.0)).run()
    require_clean(world)
    # By then, and the time that deletion takes.
    assert 7200 <= world.time - 1_000_000 < 7200 + 300


def test_ctrl_c_deletes_everything_even_if_the_service_stumbles(world, backend):
    world.stop_at = world.time + 300
    world.fault = random_faults(3, 0.3)
    with pytest.raises(StoppedError):
        reconciler(world, backend).run()
    require_clean(world)
    assert attempts(world)[TRAINER] == 1


def test_a_creation_that_lands_after_the_end_is_not_left_behind(world, backend):
    """Its answer never came, the run is stopped, and then it is there."""
    late = []

    def fault(method, path):
        if method == "POST":
            late.append(world.time)
            return "dropped"
        return ""

    job = launching.job(builder="")

    def land(world):
        if late and world.time > late[0] + 60 and not world.creations:
            query = {"queuedResourceId": f"{job.run}-trainer-001"}
            labels = {"realm-run": job.run, "realm-role": TRAINER}
            body = {"tpu": {"nodeSpec": [{"node": {"labels": labels}}]}}
            path = "/v2/projects/p/locations/us-central2-b/queuedResources"
            world.answer("POST", path, query, body)

    world.fault, world.on_tick, world.working = fault, land, False
    world.stop_at = world.time
    with pytest.raises(StoppedError):
        reconciler(world, backend, job).run()
    assert world.creations
    require_clean(world)


def test_what_cannot_be_deleted_is_named(world, backend):
    world.fault = lambda method, path: "500" if method == "DELETE" else ""
    world.stop_at = world.time + 300
    job = launching.job(builder="")
    with pytest.raises(GaveUpError, match=f"could not delete {job.run}-trainer-001"):
        reconciler(world, backend, job).run()


def test_a_launcher_that_died_is_followed_by_one_that_takes_its_slices(world, backend):
    job = launching.job()
    first = reconciler(world, backend, job)
    # It dies between two passes: nothing of it is ever called again.
    for _ in range(5):
        first._pass()
        world.wait(30)
    assert len(world.active()) == 2
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}


def test_a_launcher_ends_when_another_has_the_run(world, backend):
    job = launching.job()
    first = reconciler(world, backend, job)
    first._pass()
    Attempts(world.store, job.run, world.now())
    with pytest.raises(TakenOverError):
        first.run()
    assert len(world.resources) == 2


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_launcher_that_is_late_does_not_cost_the_healthy_slice(
    world, backend, is_noticed
):
    """It was stopped between its last look and its request; two others came since."""
    job = launching.job(builder="")
    late, second = (reconciler(world, backend, job) for _ in range(2))
    for _ in range(8):
        second._pass()
        world.wait(30)
    assert len(world.active()) == 1
    if is_noticed:
        with pytest.raises(TakenOverError):
            late._begin(job.roles[0], late._progress[TRAINER])
        assert attempts(world) == {TRAINER: 1}
    else:
        late._attempts.require_ours = lambda: None
        late._begin(job.roles[0], late._progress[TRAINER])
        assert attempts(world) == {TRAINER: 2}
    reconciler(world, backend, job).run()
    assert world.resources == {}
    assert worker_state.read_done(world.store, job.run, TRAINER).attempt == 1
    for number in (1, 2):
        assert read_attempt(world.store, job.run, TRAINER, number).ended


def test_roles_may_be_in_zones_of_their_own(world, backend):
    zones = {}

    def watch(world):
        zones.update({n.split("-")[-2]: r.zone for n, r in world.resources.items()})

    world.on_tick = watch
    job = launching.job(builder_zone="us-east1-d", builder_provisioning="spot")
    reconciler(world, backend, job).run()
    require_clean(world)
    assert zones == {TRAINER: "us-central2-b", BUILDER: "us-east1-d"}
    spot = {
        query["queuedResourceId"].split("-")[-2]: "spot" in body
        for method, _, query, body, _ in world.requests
        if method == "POST"
    }
    assert spot == {TRAINER: False, BUILDER: True}


@pytest.mark.full
def test_a_run_by_gcloud(world, monkeypatch, tmp_path):
    """The program takes its time for each word, and tries again by itself."""
    if not shutil.which("gcloud"):
        pytest.skip("needs gcloud")
    preempted = []

    def weather(world):
        if world.active() and not preempted:
            preempted.extend(world.active())
            world.preempt(preempted[0])

    losses = iter(["lost"])
    world.on_tick = weather
    world.fault = lambda method, path: next(losses, "") if method == "POST" else ""
    world.steps = 20
    monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with served(world) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        reconciler(world, GcloudBackend("p"), launching.job(builder="")).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 2}


def test_a_builder_that_hears_of_no_trainer_is_not_done(world, backend):
    """It ends with code 0 after a while; the trainer has far to go."""
    world.steps_of = {TRAINER: 900}
    job = launching.job()
    reconciler(world, backend, job).run()
    require_clean(world)
    assert attempts(world) == {TRAINER: 1, BUILDER: 1}
    trainer, builder = (
        worker_state.read_done(world.store, job.run, role)
        for role in (TRAINER, BUILDER)
    )
    assert builder.time >= trainer.time > world.time - 600


def test_what_is_done_is_not_launched_again(world, backend):
    job = launching.job()
    reconciler(world, backend, job).run()
    before = dict(world.creations)
    reconciler(world, backend, job).run()
    assert world.creations == before
