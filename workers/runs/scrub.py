"""Texts without what is secret: values that are known to be, passwords in addresses, and what looks like a key.

A text of an error may quote rows of the user's data: after the name of an exception, all literals are left out.
"""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from stageline.pipeline.addresses import masked

GONE = "[left out]"
SHORTEST = 6  # characters of a secret that is looked for: shorter ones occur in any text
_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)|secret|token|api_?key|credential|auth|private|cookie|signature|_key$|^key$|^sig$",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?<=://)([^\s/@:]*):([^\s/]+|\S{1,300})@")  # up to the last @ that may be its end
_KEYS = re.compile(r"#k1\.[\w.~:-]+|\bk1-(?:secret|encrypted)\.[\w.~+/=-]+")
_NAMES = (  # of a setting, a variable or an option; counts of tokens and a tokenizer are none
    r"(?:pass(?:word|wd|phrase)?|authorization|cookie|(?:secret|token(?!s|i[sz])|password|passwd|credential|signature"
    r"|(?:api|access|account|private)[_-]?key)[\w-]{0,40})"
)
_NAMED = re.compile(
    rf"""((?:{_NAMES}["']?\s*[=:]\s*|(?<![a-z0-9])sig["']?=|(?<![\w-])--[a-z-]{{0,40}}{_NAMES}\s+(?!-)))"""
    rf"""(?!{re.escape(GONE)})"""
    r"""("[^"\n]*"|'[^'\n]*'|["']?(?:(?:bearer|basic)\s+)?[^\s"',;&)\]}](?:[^\s"',;&)\]}]|["'](?=\w))*)""",
    re.IGNORECASE,
)
_COOKIES = re.compile(  # all parts of a header, up to its end, or to the end of the text that quotes it
    r"""(cookie["']?\s*[=:]\s*["']?)[^\s"',;=]+(?:=(?:"[^"\n]*"|[^\s"';]*))?"""
    r"""(?:;[ \t]*(?:secure|httponly|partitioned|[^\s"',;=]+=(?:"[^"\n]*"|[^\s"';]*)))*""",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[a-z]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?i:\bbearer\s+[\w.~+/=-]{8,})"
    r"|-----BEGIN [^-\n]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [^-\n]*-----|\Z)"
)
_EXCEPTION = re.compile(r"(\b[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Stop\w*): )([^\n]*)")
_LITERAL = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|\[[^\]\n]*\d[^\]\n]*\]?""")


def is_secret_name(name: str) -> bool:
    """Return True if what has this name, such as a variable of the environment, is to be taken for a secret."""
    return bool(_SECRET_NAME.search(name))


def passwords_in(text: str) -> set[str]:
    """Return the passwords of the addresses in `text`, as they are written and as they are meant."""
    found = {password for _, password in _PASSWORD.findall(text)}
    return found | {unquote(each) for each in found}


class Scrub:
    """A cleaner of texts and facts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Leave out `secrets`, of which those are ignored that are shorter than SHORTEST characters."""
        known = sorted({each for each in secrets if len(each) >= SHORTEST}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        if self._secrets is not None:
            text = self._secrets.sub(GONE, text)
        text = _KNOWN.sub(GONE, text)
        text = _KEYS.sub(GONE, text)
        text = _PASSWORD.sub(rf"\1:{GONE}@", text)
        text = _COOKIES.sub(rf"\1{GONE}", text)
        text = _NAMED.sub(rf"\1{GONE}", text)
        return _EXCEPTION.sub(lambda found: found[1] + _LITERAL.sub(GONE, found[2]), text)

    def facts(self, value: object) -> object:
        """Return facts of JSON's own types, all texts in them without secrets; of what has a secret's name, nothing."""
        if isinstance(value, str):
            return self.text(value if re.search(r"\s", value) else masked(value))
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._named(str(name), each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.facts(each) for each in value]
        return value

    def _named(self, name: str, value: object) -> object:
        if isinstance(value, str) and value and is_secret_name(name):
            return GONE
        return self.facts(value)


def argument(value: object) -> object:
    """Return what is told of an argument of the user's code: numbers and names of files' functions, of texts a length.

    An argument may be a token or a row.
    """
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]{1,200}\.py:\w{1,100}", value) else f"<text of {len(value)} characters>"
    if isinstance(value, Mapping):
        return {str(name): argument(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [argument(each) for each in value]
    return value
