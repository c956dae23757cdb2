"""The digests that both ends of a queue give of its messages."""

from collections import deque
from contextlib import ExitStack

from stageline.broker.codec.message import Flow
from stageline.broker.codec.structure import FormerFingerprint, digest_of
from stageline.broker.control.messages import StepDigest
from stageline.broker.queues.base import QueueKey
from stageline.broker.transports.redis.entries import StepDigests
from support.queue_pair import KEY
from support.redis_queues import line_at, payloads, put_all, take_all
from support.redis_server import shared_server


def steps(found: deque[StepDigest]) -> list[int]:
    return [step for _, step, _ in found]


def test_both_ends_of_a_queue_give_each_whole_step_the_same_digest(stack: ExitStack) -> None:
    line = line_at(stack, shared_server().own_database())
    tensors = payloads(10)
    put_all(line, tensors)
    take_all(line, tensors)
    assert steps(line.producer.digests) == [0, 1]  # two messages of step 2 are not all
    assert list(line.producer.digests) == list(line.consumer.digests)
    assert {queue for queue, _, _ in line.consumer.digests} == {str(KEY)}


def test_a_digest_tells_other_numbers_and_another_order_apart() -> None:
    found: deque[StepDigest] = deque()
    for tensors in ([1, 2], [2, 1], [1, 3]):
        end = StepDigests(KEY, 2, found)
        for number, value in enumerate(tensors):
            end.add(number, value)
    assert len({digest for _, _, digest in found}) == 3


def test_messages_from_the_middle_of_a_step_on_and_without_content_have_none() -> None:
    found: deque[StepDigest] = deque()
    end = StepDigests(KEY, 2, found)
    for number in (1, 2, 3, 5, 6, 8, 9):  # of step 0 the end, step 1 whole, of 2 the end, of 3 the beginning, 4 whole
        end.add(number, number)
    end.add(10, FormerFingerprint(None))
    end.add(11, 11)
    assert steps(found) == [1, 4]


def test_what_is_left_of_a_message_without_content_has_the_digest_that_it_had() -> None:
    found: deque[StepDigest] = deque()
    fingerprint = (7, "float32", (3,), (1,), False)
    end = StepDigests(QueueKey(Flow.CALL, 0), 4, found)
    end.add(0, fingerprint)
    end.add(0, FormerFingerprint(digest_of(fingerprint)))
    assert found[0] == found[1]
