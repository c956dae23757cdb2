"""Refusals: what is at a broker's address takes no connection with the keys of this process, and what to do then."""

from stageline.broker.keys.pairs import KeyPair
from stageline.broker.keys.refusal import KeyRefusal
from stageline.pipeline.addresses import masked, parted

NEW_LINE = "paste the line that the broker prints, or that `stageline keys invite` prints on its machine"

_TEXTS = {
    KeyRefusal.ANOTHER_KEY: (
        "the broker at {address} has another key than the address says: it is another broker, or another process "
        f"answers there; {NEW_LINE}"
    ),
    KeyRefusal.NO_KEYS: (
        "the process at {address} uses no keys: it is no broker, or one with broker.insecure = true; look at what "
        "listens there"
    ),
    KeyRefusal.KEYS_NEEDED: (
        f"the broker at {{address}} has keys, and this address has none; {NEW_LINE}, such as "
        "stageline worker --join 'tcp://desk:7000#k1....'"
    ),
}


def explained(refusal: KeyRefusal, url: str, pair: KeyPair | None) -> str:
    """Return the text of a refusal, with the way out.

    Args:
        refusal: Reason why there is no connection.
        url: Address of the broker.
        pair: Pair with which it was dialled; None without a key.
    """
    if not refusal.may_pass or pair is None:
        return _TEXTS[refusal].format(address=shown(url))
    what = "has revoked" if refusal is KeyRefusal.REVOKED else "does not admit"
    return f"the broker at {shown(url)} {what} the key of this machine. {admitting(pair)}"


def shown(url: str) -> str:
    """Return the address, without its key and its password, for people."""
    return masked(parted(url)[0])


def admitting(pair: KeyPair) -> str:
    """Return how the key of this machine is admitted, as a sentence."""
    return f"On the broker's machine: stageline keys admit {pair.public.text}"
