"""A run in which no worker computes ends by itself, and names which worker waits for which, and their queues."""

import msgspec

from stageline.broker.control.protocol import Refused, Stop
from stageline.broker.membership.failure_detector import Standstill
from support.conversation import Talk, hello, name, report

BOUND = 60.0


def test_a_run_in_which_all_wait_for_ever_ends_and_names_the_queues():
    talk = Talk()
    for index in (0, 1):
        talk.join(index)
    heard = []
    for number in range(1, 800):
        for index in (0, 1):
            heard += talk.say(name(index), report(index, actions=3, number=number))
        heard += talk.after(0.1)
    stops = [sentence for _, sentence in heard if isinstance(sentence, Stop)]
    assert stops
    assert stops[0].code == 1
    assert "every worker has been waiting for another for 60 s" in stops[0].reason
    assert "worker 1 at ipc://1 on host desk" in stops[0].reason


def test_a_worker_that_gets_on_restarts_the_bound():
    talk = Talk()
    for index in (0, 1):
        talk.join(index)
    for number in range(1, 1500):
        for index in (0, 1):
            talk.say(name(index), report(index, actions=number // 500, number=number))
        talk.after(0.1)
    assert talk.status()["phase"] == "running"


def test_there_is_no_standstill_before_all_workers_have_reported():
    standstill = Standstill(lease=10.0)
    assert standstill.bound == BOUND
    assert standstill.lasts([], 5.0) == 0.0


def test_queues_on_sockets_of_one_machine_are_refused_on_two():
    talk = Talk()
    talk.join(0)
    talk.say(name(1), msgspec.structs.replace(hello(1), host="laptop"))
    said = talk.say(name(1), msgspec.structs.replace(hello(1, incarnation=2, endpoint="ipc://1"), host="laptop"))
    (refusal,) = [sentence for _, sentence in said if isinstance(sentence, Refused)]
    assert refusal.code == 78
    assert "set queues.url to tcp://" in refusal.reason
