"""A TPU VM in a folder, for its startup script: what it finds on PATH is made here.

`gcloud` copies as the real one does, `apt-get` installs what it is asked for, `make`
makes a stand-in of an environment, and in `sleep` no time passes. What all of them, and
the `uv` of that environment, are asked is kept.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping

from realm_jax.hardware import LaunchConfig
from realm_jax.storage import open_store
from tpu_launch import records, slices
from tpu_launch.bundle import make_bundle
from tpu_launch.run import TRAINER, Role, Run
from tpu_launch.tpu_vm import startup_script

ROOT = pathlib.Path(__file__).parents[2]
RUN, DEADLINE = "realm-0a1b2c", 4_000_000_000
NAME = f"{RUN}-trainer-1"
# All that the script needs of an image, without Python and make.
_IMAGE = ("bash", "cat", "chmod", "gzip", "ln", "mkdir", "rm", "sha256sum", "tar")
_IMAGE += ("touch", "kill", "dirname", "env", "sed", "date")
# It copies between folders; what the real one takes is checked by its own parser.
_GCLOUD = """\
case "$1 $2" in
  "compute tpus") ;;
  "storage cp") if [ "$3" = - ]; then /bin/cat > "$4"; else /bin/cp "$3" "$4"; fi ;;
  "storage rsync") /bin/cp --recursive "${@: -2:1}/." "${@: -1}" ;;
  *) exit 2 ;;
esac
"""
_MAKE = """\
folder="${1#--directory=}/.venv/bin"
mkdir -p "$folder"
cat > "$folder/python" << 'END'
#!/bin/sh
exec PYTHON "$@"
END
cat > "$folder/uv" << 'END'
#!/bin/sh
echo "uv $*" >> SAID
END
chmod +x "$folder/python" "$folder/uv"
"""
_APT_GET = """\
for word in "$@"; do
  case "$word" in
    make) ln -s MAKE FOLDER/make ;;
    python3.11) ln -s PYTHON FOLDER/python3.11 ;;
  esac
done
"""


class TpuVm:
    """A machine that is worker 0 of one; `boot` runs its startup script to the end.

    Attributes:
      home: where the script puts things.
      store: the model directory.
      code: checksum of the bundle that it runs.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        metadata: str,
        model_dir: str = "",
        *,
        is_bare: bool = False,
        installs: bool = False,
    ):
        """Makes one in an empty folder, as by default is its model directory.

        `metadata` is the address of its metadata server. One that `is_bare` has yet to
        install Python and make. Where it `installs`, all but `gcloud` and `apt-get` is
        this machine's, so that the environment is really made.
        """
        self.home, self.code = folder / "home", ""
        self.store = open_store(model_dir or folder / "model")
        self._metadata = metadata
        self._booted: list[int] = []
        self._folder, self._said = folder, folder / "said"
        self._path, self._to_install = folder / "bin", folder / "packages"
        for made in (self._path, self._to_install):
            made.mkdir(parents=True)
        self._write(self._path / "gcloud", _GCLOUD, "/bin/bash")
        self._write(self._path / "apt-get", _APT_GET)
        self._others = f":{os.environ['PATH']}" if installs else ""
        if installs:
            return
        for name in _IMAGE:
            (self._path / name).symlink_to(str(shutil.which(name)))
        # Nobody lives to see the deadline, unless it is over.
        self._write(self._path / "sleep", '[ "$1" -lt 100 ]\n')
        self.make_does()
        if not is_bare:
            (self._path / "make").symlink_to(self._to_install / "make")
            (self._path / "python3.11").symlink_to(sys.executable)

    def use_real_gcloud(self, config: pathlib.Path) -> Mapping[str, str]:
        """Puts the `gcloud` of this machine in place, with its settings in a folder.

        Returns the environment that points it here.
        """
        program = shlex.quote(str(shutil.which("gcloud")))
        path = shlex.quote(os.environ["PATH"])
        self._write(self._path / "gcloud", f'PATH={path}\nexec {program} "$@"\n')
        server = os.environ["STORAGE_EMULATOR_HOST"]
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{server}/storage/v1/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CONFIG": str(config),
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        }

    def make_does(self, first: str = "") -> None:
        """Says what `make` does before it makes an environment."""
        self._write(self._to_install / "make", first + _MAKE)

    def said(self, program: str) -> list[list[str]]:
        """Returns the arguments of each run of a program so far."""
        lines = self._said.read_text().splitlines() if self._said.exists() else []
        words = [shlex.split(line) for line in lines]
        return [one[1:] for one in words if one[0] == program]

    def outcome(self) -> records.Outcome | None:
        """What the model directory says of the end of the work."""
        return records.outcomes(self.store).get(TRAINER)

    def log(self) -> str:
        return self.store.read(f"launch/logs/{NAME}/0.log").decode()

    def times_given_back(self) -> int:
        """How often the slices were deleted."""
        deletes = [words for words in self.said("gcloud") if words[0] == "compute"]
        assert all(words[4] == NAME for words in deletes)
        return len(deletes)

    def ship(self, checkout: pathlib.Path) -> None:
        """Ships the bundle of a checkout, to run it from now on."""
        bundle = make_bundle(checkout)
        bundle.ship(self.store)
        self.code = bundle.sha256

    def script(
        self,
        *command: str,
        fetch: Mapping[str, str] | None = None,
        left_out: Mapping[str, str] | None = None,
        deadline: int = DEADLINE,
    ) -> str:
        """Returns the startup script of a trainer, by default of `tasks --help`."""
        config = LaunchConfig(project="p", zone="z", fetch=fetch or {})
        machines, command = slices.parse("v4-8"), command or ("tasks", "--help")
        role = Role(TRAINER, machines, 1, "spot", command, "z", left_out or {})
        run = Run(RUN, self.store.url(), (role,), self.code, config)
        return startup_script(run, role, NAME, deadline, str(self.home))

    def boot(self, script: str = "", code: int = 0, **environment: str) -> str:
        """Boots once; returns what the script said, which ended with a code."""
        path = self._folder / "startup-script"
        path.write_text(script or self.script())
        path.chmod(0o755)
        kept = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
        told = {
            "PATH": f"{self._path}{self._others}",
            "GCE_METADATA_HOST": self._metadata,
        }
        process = subprocess.Popen(
            [path],
            cwd="/",
            env={**kept, **told, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._booted.append(process.pid)
        said, errors = process.communicate()
        assert process.returncode == code, errors
        return said

    def shut_down(self) -> None:
        """Ends what a boot left running: the watch for the deadline."""
        for group in self._booted:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _write(self, path: pathlib.Path, text: str, program: str = "/bin/sh") -> None:
        """Writes a program that keeps what it is asked."""
        places = {
            "SAID": self._said,
            "PYTHON": sys.executable,
            "MAKE": self._to_install / "make",
            "FOLDER": self._path,
        }
        for name, place in places.items():
            text = text.replace(name, shlex.quote(str(place)))
        keep = f'echo {path.name} "$@" >> {shlex.quote(str(self._said))}\n'
        path.write_text(f"#!{program}\n{keep}{text}")
        path.chmod(0o755)
