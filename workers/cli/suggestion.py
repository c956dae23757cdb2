"""What a user may have meant."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Continues a sentence about an unknown word: the nearest known one, or all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
