"""`stageline init`: a plan, a model and data to start from."""

import json
import shlex
from importlib.resources import files
from pathlib import Path

import click

from stageline.workers.cli.output import say

SCHEMA = ".stageline.schema.json"
TEMPLATES = ("stageline.toml", "model.py", "data.py")


@click.command(epilog="Example: stageline init spiral && stageline train spiral")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
def init(folder: Path) -> None:
    """Write a plan that trains, with a model and data, into FOLDER (this one if not given).

    Nothing is overwritten. The JSON schema beside the plan lets editors complete and check its keys.
    """
    from stageline.pipeline.plan.keys.models import plan_schema

    templates = files("stageline.workers.cli") / "templates"
    texts = {name: (templates / name).read_text(encoding="utf-8") for name in TEMPLATES}
    texts[SCHEMA] = json.dumps(plan_schema(), indent=2) + "\n"
    if existing := [name for name in texts if (folder / name).exists()]:
        where = "this folder" if folder == Path() else folder
        raise click.UsageError(
            f"{where} already holds {', '.join(existing)}, and nothing is overwritten; name another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    say(f"wrote {', '.join(str(folder / name) for name in texts)}")
    named = () if folder == Path() else (str(folder),)
    say(f"train it with: {shlex.join(('stageline', 'train', *named))}")
