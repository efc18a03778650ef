# Ubuntu's Python without its venv package has no ensurepip. The environment of a
# checkout has everything that its user's modules may import; the bundle of an
# installation has no such modules, and the trainer's requirements are enough.
if ! command -v make > /dev/null || ! python3.11 -c "import ensurepip"; then
  apt-get --option=DPkg::Lock::Timeout=600 update
  apt-get --option=DPkg::Lock::Timeout=600 install --yes \
    make python3.11 python3.11-venv
fi
if [ -e "$checkout/Makefile" ]; then
  make --directory="$checkout" env
  "$checkout/.venv/bin/uv" pip install --python "$checkout/.venv/bin/python" \
    --no-deps --require-hashes --requirement "$checkout/requirements-tpu.lock"
else
  python3.11 -m venv "$checkout/.venv"
  "$checkout/.venv/bin/python" -m pip install --no-deps --require-hashes \
    --requirement "$checkout/tpu_launch/requirements.lock"
fi
