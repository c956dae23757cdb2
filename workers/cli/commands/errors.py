"""`stageline errors`: explains the code at the end of a message."""

import difflib

import click

from stageline.workers.cli import options
from stageline.workers.cli.error_pages import ErrorPage, error_pages, reference
from stageline.workers.cli.help import Command, codes
from stageline.workers.cli.output import answer, say, show


@click.command(
    cls=Command,
    examples=("stageline errors SL101", "stageline errors --search disk"),
    groups={"Which": ("--search",), "Output": ("--page",)},
    codes=codes(usage="there is no such error"),
)
@click.argument("code", required=False)
@click.option("--search", metavar="TEXT", help="List the errors that have TEXT in their explanation.")
@click.option("--page", is_flag=True, help="Print the page of the documentation.")
@options.as_json
def errors(code: str | None, search: str | None, page: bool, as_json: bool) -> None:
    """Explain the error CODE, as at the end of a message.

    Its cause, what to do about it, and an example. Without CODE, all are listed.
    """
    pages = error_pages()
    if page:
        click.echo(reference(pages.values()), nl=False)
        return
    found = [_page_of(code, pages)] if code else list(pages.values())
    if search:
        found = [each for each in found if search.lower() in each.text.lower()]
        if not found:
            raise click.UsageError(f"no error has {search!r} in its explanation; `stageline errors` lists them all")
    answer({"schema": "errors/1", "errors": found}, as_json, lambda: say(found[0].text) if code else _show(found))


def _page_of(code: str, pages: dict[str, ErrorPage]) -> ErrorPage:
    """Return the page of a code, in any form, or of a class's name. Raises `UsageError` with the nearest ones."""
    named = {page.name: page for page in pages.values()}
    number = code.strip("[]").upper().removeprefix("SL").replace("O", "0")
    found = pages.get(f"SL{number}") or named.get(code)
    if found is None:
        near = difflib.get_close_matches(code, named, n=3, cutoff=0.5)
        if number.isdecimal():
            near = sorted(pages, key=lambda each: abs(int(each.removeprefix("SL")) - int(number)))[:3]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise click.UsageError(f"there is no error {code}; {hint}`stageline errors` lists all codes")
    return found


def _show(pages: list[ErrorPage]) -> None:
    show("errors", ("code", "error", "cause"), [(each.code, each.name, each.cause) for each in pages])
