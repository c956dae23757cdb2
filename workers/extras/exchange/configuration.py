"""The config.json of an exported model: one that the user has, or that of the model which the plan's factory makes."""

import json
from collections.abc import Mapping
from pathlib import Path

from stageline.pipeline.plan import Plan

from .export import CONFIG
from .planned import planned_model
from .stored_weights import WeightsUnusable


def read_configuration(path: Path) -> Mapping[str, object]:
    """Of a file, or of the config.json in a folder. Raises `WeightsUnusable`."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsUnusable(f"--config {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise WeightsUnusable(f"--config {file} is no table of settings, as save_pretrained writes it")
    return found


def planned_configuration(plan: Plan) -> Mapping[str, object]:
    """Of the model that the plan's factory returns. Raises `ModelRefused`, or `WeightsUnusable` if it has none."""
    return configuration_of(planned_model(plan), f'model.factory = "{plan.model.factory}"')


def configuration_of(model: object, origin: str) -> Mapping[str, object]:
    """Of `model`, which comes from `origin`. Raises `WeightsUnusable` if it is not of transformers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise WeightsUnusable(
            f"{origin} returned a {type(model).__name__} without a config of transformers: name a folder with its "
            "config.json by --config"
        )
    found = json.loads(config.to_json_string())  # values of JSON alone
    return {**found, "architectures": found.get("architectures") or [type(model).__name__]}
