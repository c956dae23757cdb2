"""The code that pages of the documentation show."""

import re
from pathlib import Path


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def named_files(page: Path) -> dict[str, str]:
    """The files that a page shows whole: its name in a line of its own, then the block."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
