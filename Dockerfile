# The image of pods that start at once (docs/pods.md), with the versions of the lock file:
#     docker build --tag=REGISTRY/realm . && docker push REGISTRY/realm
FROM python:3.11-slim
WORKDIR /opt/realm
COPY tpu_launch/requirements.lock .
RUN python -m pip install --no-cache-dir --no-deps --require-hashes \
    --requirement requirements.lock
COPY setup.py pyproject.toml ./
COPY gin gin
COPY realm_jax realm_jax
COPY tasks tasks
COPY tpu_launch tpu_launch
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation .
ENTRYPOINT ["realm"]
