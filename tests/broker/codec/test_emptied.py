"""What is left of a message whose content is forgotten."""

import torch

from stageline.broker.codec.message import Flow, Header, Message, decode, encode, fingerprint, read_header
from stageline.broker.codec.structure import agree, emptied, is_emptied, rest_of


def header(payload: object) -> Header:
    return read_header(encode(Message("run", Flow.CALL, 3, 0, 1, 1, 3, payload))[0])


def test_an_emptied_message_agrees_with_what_it_was_and_with_nothing_else():
    whole, other = header((torch.ones(3), "a")), header((torch.zeros(3), "a"))
    left = fingerprint(header(emptied(fingerprint(whole), ("rest", 7))))
    assert agree(left, fingerprint(whole))
    assert agree(fingerprint(header(emptied(left))), left)
    assert not agree(left, fingerprint(other))
    assert not agree(fingerprint(whole), fingerprint(other))


def test_one_that_never_had_its_content_agrees_with_any():
    assert agree(fingerprint(header(emptied())), fingerprint(header(torch.ones(3))))


def test_the_rest_arrives():
    payload = decode(encode(Message("run", Flow.CALL, 3, 0, 1, 1, 3, emptied(rest=("train", {"rows": 7}))))).payload
    assert is_emptied(payload)
    assert rest_of(payload) == ("train", {"rows": 7})
    assert not is_emptied({"stageline": "skip"})
