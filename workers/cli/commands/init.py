"""`stageline init`: a plan, a model and data to start from."""

import json
import shlex
from importlib.resources import files
from pathlib import Path

import click

from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import say

SCHEMA = ".stageline.schema.json"
TEMPLATES = ("stageline.toml", "model.py", "data.py")


@click.command(
    cls=Command,
    examples=("stageline init", "stageline init spiral && stageline train spiral"),
    codes=codes(usage="an argument is wrong, or a file is there already"),
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
def init(folder: Path) -> None:
    """Write a plan that trains, with model and data, into FOLDER.

    Default: this folder. Nothing is overwritten. The JSON schema beside the plan lets editors complete and check its
    keys.
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
