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
from tests.tpu_launch.tpu_vm import NAME, TpuVm, script, shipped
from tests.waiting import wait_until
from tpu_launch import records
from tpu_launch.run import TRAINER, unread_examples

pytestmark = pytest.mark.full

_HELP = ("tasks", "--help")
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
def model_dir(tmp_path):
    return str(tmp_path / "model")


@pytest.fixture
def store(model_dir):
    return open_store(model_dir)


@pytest.fixture
def server(metadata):
    """Where the metadata of a slice of one worker are."""
    metadata |= {"agent-worker-number": "0", "worker-network-endpoints": "127.0.0.1"}
    return metadata["host"]


@pytest.fixture
def vm(tmp_path, server):
    return TpuVm(tmp_path / "vm", server)


@pytest.fixture
def told(checkout, store):
    return shipped(checkout, store)


def outcome(store):
    return records.outcomes(store).get(TRAINER)


def log(store):
    return store.read(f"launch/logs/{NAME}/0.log").decode()


def given_back(vm):
    deletes = [words for words in vm.said("gcloud") if words[0] == "compute"]
    assert all(words[4] == NAME for words in deletes)
    return len(deletes)


def test_a_worker_runs_the_code_of_the_bundle(vm, model_dir, store, told):
    done = vm.boot(script(vm, model_dir, told, _HELP))
    assert done.returncode == 0, done.stderr
    assert _SAYS in log(store)
    assert outcome(store).done
    assert given_back(vm) == 1
    home = vm.home / told
    assert vm.said("make") == [[f"--directory={home}", "env"]]
    [installed] = vm.said("uv")
    assert installed[:2] == ["pip", "install"]
    assert installed[-1] == str(home / "requirements-tpu.lock")
    assert vm.said("apt-get") == []


def test_a_worker_runs_what_was_installed_where_it_was_launched(
    vm, model_dir, store, tmp_path
):
    code = tmp_path / "site-packages"
    for package in ("realm_jax", "tasks", "tpu_launch"):
        shutil.copytree(tpu_vm.ROOT / package, code / package)
    gin = code / "realm_jax" / "gin"
    shutil.copytree(tpu_vm.ROOT / "gin", gin)
    (gin / "runs" / "bundled.gin").write_text("no_such_thing.setting = 1\n")
    vm.makes_environments()
    told = shipped(code, store)
    command = ("pretrain", "--gin_file=realm_jax/gin/runs/bundled.gin")
    assert vm.boot(script(vm, model_dir, told, command)).returncode == 2
    assert "no_such_thing" in outcome(store).message
    lock = vm.home / told / "tpu_launch/requirements.lock"
    assert lock.read_bytes() == (code / "tpu_launch" / lock.name).read_bytes()
    words = ["pip", "install", "--no-deps", "--require-hashes", "--requirement"]
    assert vm.said("pip") == [[*words[1:], str(lock)]]
    assert vm.said("make") == []


def test_another_boot_installs_nothing_and_runs_nothing_done(
    vm, model_dir, store, told, tmp_path
):
    corpus = tmp_path / "corpus"
    (corpus / "shards").mkdir(parents=True)
    (corpus / "meta.json").write_text("{}")
    (corpus / "shards" / "0").write_text("first")
    disk = tmp_path / "a disk"
    text = script(vm, model_dir, told, _HELP, {str(corpus): str(disk)})
    assert vm.boot(text).returncode == 0
    assert (disk / "meta.json").read_text() == "{}"
    assert (disk / "shards" / "0").read_text() == "first"
    (corpus / "shards" / "0").write_text("second")
    said = log(store)
    done = vm.boot(text)
    assert done.returncode == 0, done.stderr
    assert "the work is done" in done.stdout
    assert log(store) == said
    assert (disk / "shards" / "0").read_text() == "second"
    assert len(vm.said("make")) == len(vm.said("uv")) == 1
    copies = [words[1] for words in vm.said("gcloud") if words[0] == "storage"]
    assert copies == ["cp", "rsync", "rsync"]


def test_bad_input_reaches_the_model_directory(vm, model_dir, store, told):
    """By a gin file that is nowhere but in the bundle."""
    command = ("tasks", "--show=1")
    done = vm.boot(script(vm, model_dir, told, command))
    assert done.returncode == 2
    found = outcome(store)
    assert (found.done, found.code) == (False, 2)
    assert "expected the name of a task to --show" in found.message
    assert given_back(vm) == 1
    records.forget_outcomes(store)
    command = ("pretrain", "--gin_file=gin/runs/bundled.gin")
    assert vm.boot(script(vm, model_dir, told, command)).returncode == 2
    assert "no_such_thing" in outcome(store).message


def test_a_damaged_bundle_is_not_run(vm, model_dir, store, told):
    [name] = store.list("launch/bundles")
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data))
    done = vm.boot(script(vm, model_dir, told, _HELP))
    assert done.returncode == 1
    assert "code.tar.gz: FAILED" in done.stdout
    # It may have been the copying.
    copies = [words for words in vm.said("gcloud") if words[:2] == ["storage", "cp"]]
    assert len(copies) == 5 + 1
    assert vm.said("make") == []
    # The run has failed, and costs nothing more.
    assert "code or data could not be fetched" in outcome(store).message
    assert given_back(vm) == 1
    assert not list(vm.home.glob("*/setup.py"))


def test_a_worker_that_can_say_nothing_gives_the_slices_back(vm, told, tmp_path):
    """Neither its code nor its word gets through."""
    store = tmp_path / "gone" / "model"
    done = vm.boot(script(vm, str(store), told, _HELP))
    assert done.returncode == 1
    assert not store.exists()
    assert given_back(vm) == 1


def test_a_worker_without_a_place_gives_the_slices_back(
    vm, model_dir, store, told, metadata
):
    metadata.pop("agent-worker-number")
    assert vm.boot(script(vm, model_dir, told, _HELP)).returncode == 2
    assert "agent-worker-number" in outcome(store).message
    assert given_back(vm) == 1


def test_what_fails_once_is_tried_again(vm, model_dir, store, told):
    vm.make_does('[ -e "$0".tried ] || { touch "$0".tried; exit 1; }\n')
    done = vm.boot(script(vm, model_dir, told, _HELP))
    assert done.returncode == 0, done.stderr
    assert (len(vm.said("make")), len(vm.said("sleep"))) == (2, 1 + 1)
    assert outcome(store).done


def test_an_installation_that_was_killed_begins_anew(vm, model_dir, store, told):
    home = vm.home / told
    half = home / ".venv" / "half"
    vm.make_does(
        f"mkdir {half.parent} || exit 0\ntouch {half}\nrm {home}/setup.py\n"
        "kill -s KILL $PPID\n"
    )
    text = script(vm, model_dir, told, _HELP)
    assert vm.boot(text).returncode == -9
    assert half.exists()
    assert not (home / "setup.py").exists()
    vm.make_does()
    done = vm.boot(text)
    assert done.returncode == 0, done.stderr
    assert not half.exists()
    assert (home / "setup.py").exists()
    assert outcome(store).done


def test_the_deadline_needs_nobody(vm, model_dir, store, told):
    """Not even the worker, which ends by itself then."""
    done = vm.boot(script(vm, model_dir, told, _HELP, deadline=1))
    assert done.returncode == 1
    assert outcome(store) is None
    wait_until(lambda: given_back(vm) == 2)


def test_what_the_image_lacks_is_installed(tmp_path, model_dir, told, server):
    vm = TpuVm(tmp_path / "bare", server, is_bare=True)
    done = vm.boot(script(vm, model_dir, told, _HELP))
    assert done.returncode == 0, done.stderr
    lock = "--option=DPkg::Lock::Timeout=600"
    packages = ["make", "python3.11", "python3.11-venv"]
    assert vm.said("apt-get") == [
        [lock, "update"],
        [lock, "install", "--yes", *packages],
    ]


def test_gcloud_knows_what_the_script_asks_of_it(tmp_path, vm, model_dir, told):
    fetch, left_out = {"gs://bucket/a": "/b"}, {"gs://bucket/a": "examples/(?!(x)/)"}
    text = script(vm, model_dir, told, _HELP, fetch, left_out).replace("\\\n", " ")
    found = re.findall(r"gcloud [^;|\n]*", text)
    lines = [shlex.split(re.sub(r"\"\$home\"", "/home", line)) for line in found]
    assert len(lines) == 4
    for line in lines:
        # Before the other flag, for which the linter would take it as the value.
        line.sort(key=lambda word: (word[:2] == "--", word[:9] != "--exclude"))
    assert gcloud_parser.complaints(lines, tmp_path) == [""] * 4


@pytest.mark.parametrize("gcloud", ["", "real"])
def test_a_worker_of_a_bucket(vm, checkout, bucket, tmp_path, gcloud, world):
    """Bundle and state in a bucket, the corpus from another folder of it.

    Of the examples there only those of its own tasks.
    """
    if gcloud and not shutil.which("gcloud"):
        pytest.skip("needs gcloud")
    told_gcloud = vm.use_real_gcloud(tmp_path / "config") if gcloud else {}
    world.resources[NAME] = Resource({}, "z", "ACTIVE")
    model_dir = f"{bucket}/startup{gcloud}/model"
    store = open_store(model_dir)
    folder = open_store(f"{bucket}/startup{gcloud}/corpora")
    read = ("old,1/corpus.json", "old,1/shards/0", "old,1/examples/a.b/train/x")
    unread = ("a.b2/train/x", "aXb/x", "a/b", "c/examples/a.b/x")
    for name in (*read, *(f"old,1/examples/{one}" for one in unread)):
        folder.write(name, b"text")
    told = shipped(checkout, store)
    fetch = {f"{bucket}/startup{gcloud}/corpora": str(tmp_path / "corpora")}
    left_out = unread_examples(fetch, str(tmp_path / "corpora/old,1"), ["a.b", "d"])
    text = script(vm, model_dir, told, _HELP, fetch, left_out)
    done = vm.boot(text, **told_gcloud)
    assert done.returncode == 0, done.stderr
    assert _SAYS in log(store)
    copied = [path for path in (tmp_path / "corpora").rglob("*") if path.is_file()]
    names = {str(path.relative_to(tmp_path / "corpora")) for path in copied}
    assert names == set(read)
    assert {path.read_bytes() for path in copied} == {b"text"}
    if gcloud:
        assert world.resources[NAME].state == "DELETING"


@pytest.mark.timeout(3600)
def test_the_environment_is_made_from_the_lock_files(
    tmp_path, model_dir, store, server
):
    """Prints how long a worker takes to its first word: see docs/pods.md."""
    vm = TpuVm(tmp_path / "vm", server, installs=True)
    told = shipped(tpu_vm.ROOT, store)
    text = script(vm, model_dir, told, ("pretrain", "--help"))
    nothing_cached = {"UV_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_CACHE_DIR": "1"}
    began = time.monotonic()
    try:
        done = vm.boot(text, **nothing_cached)
        print(f"\nfrom the boot to the end: {time.monotonic() - began:.0f} s")
        assert done.returncode == 0, done.stderr
        assert outcome(store).done
        assert "--gin_file" in log(store)
        assert vm.said("apt-get") == []
        home = vm.home / told
        found = subprocess.check_output(
            [
                home / ".venv" / "bin" / "python",
                "-c",
                "import libtpu, jax, realm_jax; print(realm_jax.__file__)",
            ],
            cwd="/",
            env={"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
            text=True,
        )
        assert found == f"{home}/realm_jax/__init__.py\n"
        began = time.monotonic()
        assert vm.boot(text, **nothing_cached).returncode == 0
        print(f"another boot: {time.monotonic() - began:.0f} s")
    finally:
        # Gigabytes.
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shutil.rmtree(vm.home, ignore_errors=True)
