"""The startup script of TPU VMs, from a bundle of this checkout to a command's end."""

import re
import shlex
import shutil
import subprocess
import time

import pytest

from realm_jax.storage import open_store
from tests.tpu_launch import gcloud_parser, tpu_vm
from tests.tpu_launch.fake_tpu import Resource
from tests.tpu_launch.tpu_vm import NAME, TpuVm
from tests.waiting import wait_until
from tpu_launch import records
from tpu_launch.run import unread_examples

pytestmark = pytest.mark.full

_SAYS = "Lists what only the bundle has."


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout that differs in one file, and has one more."""
    folder = tmp_path_factory.mktemp("checkout")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listing, cwd=tpu_vm.ROOT, text=True)
    for name in filter(None, names.split("\0")):
        if (source := tpu_vm.ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    changed = folder / "realm_jax" / "cli" / "tasks.py"
    text = changed.read_text()
    assert text.startswith('"""Lists the registered SeqIO tasks')
    changed.write_text(f'"""{_SAYS}\n' + text.removeprefix('"""'))
    (folder / "gin" / "runs" / "bundled.gin").write_text("no_such_thing.setting = 1\n")
    return folder


@pytest.fixture
def make_vm(tmp_path, metadata):
    """Makes machines with the metadata of a slice of one worker."""
    metadata |= {"agent-worker-number": "0", "worker-network-endpoints": "127.0.0.1"}
    made = []

    def make(*arguments, **options):
        made.append(TpuVm(tmp_path / "vm", metadata["host"], *arguments, **options))
        return made[-1]

    yield make
    for vm in made:
        vm.shut_down()


@pytest.fixture
def vm(make_vm, checkout):
    vm = make_vm()
    vm.ship(checkout)
    return vm


def test_a_worker_runs_the_code_of_the_bundle(vm):
    vm.boot()
    assert _SAYS in vm.log()
    assert vm.outcome().done
    assert vm.times_given_back() == 1
    home = vm.home / vm.code
    assert vm.said("make") == [[f"--directory={home}", "env"]]
    [installed] = vm.said("uv")
    assert installed[:2] == ["pip", "install"]
    assert installed[-1] == str(home / "requirements-tpu.lock")
    assert vm.said("apt-get") == []


def test_another_boot_installs_nothing_and_runs_nothing_done(vm, tmp_path):
    corpus, disk = tmp_path / "corpus", tmp_path / "a disk"
    (corpus / "shards").mkdir(parents=True)
    (corpus / "meta.json").write_text("{}")
    (corpus / "shards" / "0").write_text("first")
    text = vm.script(fetch={str(corpus): str(disk)})
    vm.boot(text)
    assert (disk / "meta.json").read_text() == "{}"
    assert (disk / "shards" / "0").read_text() == "first"
    (corpus / "shards" / "0").write_text("second")
    said = vm.log()
    assert "the work is done" in vm.boot(text)
    assert vm.log() == said
    assert (disk / "shards" / "0").read_text() == "second"
    assert len(vm.said("make")) == len(vm.said("uv")) == 1
    copies = [words[1] for words in vm.said("gcloud") if words[0] == "storage"]
    assert copies == ["cp", "rsync", "rsync"]


def test_bad_input_reaches_the_model_directory(vm):
    """By a gin file that is nowhere but in the bundle."""
    for command, said in (
        (("tasks", "--show=1"), "expected the name of a task to --show"),
        (("pretrain", "--gin_file=gin/runs/bundled.gin"), "no_such_thing"),
    ):
        vm.boot(vm.script(*command), code=2)
        found = vm.outcome()
        assert (found.done, found.code) == (False, 2)
        assert said in found.message
        records.forget_outcomes(vm.store)
    assert vm.times_given_back() == 2


def test_a_damaged_bundle_is_not_run(vm):
    [name] = vm.store.list("launch/bundles")
    data = bytearray(vm.store.read(name))
    data[len(data) // 2] ^= 1
    vm.store.write(name, bytes(data))
    assert "code.tar.gz: FAILED" in vm.boot(code=1)
    # It may have been the copying.
    copies = [words for words in vm.said("gcloud") if words[:2] == ["storage", "cp"]]
    assert len(copies) == 5 + 1
    assert vm.said("make") == []
    # The run has failed, and costs nothing more.
    assert "code or data could not be fetched" in vm.outcome().message
    assert vm.times_given_back() == 1
    assert not list(vm.home.glob("*/setup.py"))


def test_a_worker_that_cannot_work_gives_the_slices_back(vm, metadata, tmp_path):
    store, vm.store = vm.store, open_store(tmp_path / "gone" / "model")
    # Neither its code nor its word gets through.
    vm.boot(code=1)
    assert vm.times_given_back() == 1
    vm.store = store
    metadata.pop("agent-worker-number")
    vm.boot(code=2)
    assert "agent-worker-number" in vm.outcome().message
    assert vm.times_given_back() == 2


def test_what_fails_once_is_tried_again(make_vm, checkout):
    """On an image that lacks what installs."""
    vm = make_vm(is_bare=True)
    vm.ship(checkout)
    vm.make_does('[ -e "$0".tried ] || { touch "$0".tried; exit 1; }\n')
    vm.boot()
    assert (len(vm.said("make")), len(vm.said("sleep"))) == (2, 1 + 1)
    assert vm.outcome().done
    lock = "--option=DPkg::Lock::Timeout=600"
    packages = ["make", "python3.11", "python3.11-venv"]
    update, install = [lock, "update"], [lock, "install", "--yes", *packages]
    assert vm.said("apt-get") == [update, install]


def test_an_installation_that_was_killed_begins_anew(vm):
    home = vm.home / vm.code
    half = home / ".venv" / "half"
    vm.make_does(
        f"mkdir {half.parent} || exit 0\ntouch {half}\nrm {home}/setup.py\n"
        "kill -s KILL $PPID\n"
    )
    vm.boot(code=-9)
    assert half.exists()
    assert not (home / "setup.py").exists()
    vm.make_does()
    vm.boot()
    assert not half.exists()
    assert (home / "setup.py").exists()
    assert vm.outcome().done


def test_the_deadline_needs_nobody(vm):
    """Not even the worker, which ends by itself then."""
    vm.boot(vm.script(deadline=1), code=1)
    assert vm.outcome() is None
    wait_until(lambda: vm.times_given_back() == 2)


def test_gcloud_knows_what_the_script_asks_of_it(tmp_path, vm):
    fetch, left_out = {"gs://bucket/a": "/b"}, {"gs://bucket/a": "examples/(?!(x)/)"}
    text = vm.script(fetch=fetch, left_out=left_out).replace("\\\n", " ")
    found = re.findall(r"gcloud [^;|\n]*", text)
    lines = [shlex.split(re.sub(r"\"\$home\"", "/home", line)) for line in found]
    assert len(lines) == 4
    for line in lines:
        # Before the other flag, for which the linter would take it as the value.
        line.sort(key=lambda word: (word[:2] == "--", word[:9] != "--exclude"))
    assert gcloud_parser.complaints(lines, tmp_path) == [""] * 4


@pytest.mark.skipif(not shutil.which("gcloud"), reason="needs gcloud")
def test_a_worker_of_a_bucket(make_vm, checkout, bucket, tmp_path, world):
    """Bundle and state in a bucket, the corpus from another folder of it.

    Of the examples there only those of its own tasks.
    """
    vm = make_vm(f"{bucket}/startup/model")
    told_gcloud = vm.use_real_gcloud(tmp_path / "config")
    world.resources[NAME] = Resource({}, "z", "ACTIVE")
    corpora, here = f"{bucket}/startup/corpora", tmp_path / "corpora"
    read = ("old,1/corpus.json", "old,1/shards/0", "old,1/examples/a.b/train/x")
    unread = ("a.b2/train/x", "aXb/x", "a/b", "c/examples/a.b/x")
    for name in (*read, *(f"old,1/examples/{one}" for one in unread)):
        open_store(corpora).write(name, b"text")
    vm.ship(checkout)
    fetch = {corpora: str(here)}
    left_out = unread_examples(fetch, str(here / "old,1"), ["a.b", "d"])
    vm.boot(vm.script(fetch=fetch, left_out=left_out), **told_gcloud)
    assert _SAYS in vm.log()
    copied = [path for path in here.rglob("*") if path.is_file()]
    assert {str(path.relative_to(here)) for path in copied} == set(read)
    assert {path.read_bytes() for path in copied} == {b"text"}
    assert world.resources[NAME].state == "DELETING"


@pytest.mark.timeout(3600)
def test_the_environment_is_made_from_the_lock_files(tmp_path, make_vm):
    """Prints how long a worker takes to its first word: see docs/pods.md."""
    vm = make_vm(installs=True)
    vm.ship(tpu_vm.ROOT)
    text = vm.script("pretrain", "--help")
    nothing_cached = {"UV_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_CACHE_DIR": "1"}
    began = time.monotonic()
    try:
        vm.boot(text, **nothing_cached)
        print(f"\nfrom the boot to the end: {time.monotonic() - began:.0f} s")
        assert vm.outcome().done
        assert "--gin_file" in vm.log()
        assert vm.said("apt-get") == []
        program = "import libtpu, jax, realm_jax; print(realm_jax.__file__)"
        found = subprocess.check_output(
            [vm.home / vm.code / ".venv" / "bin" / "python", "-c", program],
            cwd="/",
            env={"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
            text=True,
        )
        assert found == f"{vm.home / vm.code}/realm_jax/__init__.py\n"
        began = time.monotonic()
        vm.boot(text, **nothing_cached)
        print(f"another boot: {time.monotonic() - began:.0f} s")
    finally:
        # Gigabytes.
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shutil.rmtree(vm.home, ignore_errors=True)
