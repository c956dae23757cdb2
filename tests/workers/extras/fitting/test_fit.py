"""Stages on machines: the chain found is the best of all that there are, and refusals name what stands in the way."""

import random
from itertools import combinations, pairwise, product

import pytest

from stageline.workers.extras.fitting import Hosts, LayerTimes, NoFit, fit
from stageline.workers.extras.fitting.fit import ChainSearch

LINK = {"latency": 0.01, "bandwidth": 1000.0}


def layers(seconds: list[float], bytes_each: list[int] | None = None, leaving: list[int] | None = None) -> LayerTimes:
    """Each microbatch in flight takes one byte a layer."""
    sizes = bytes_each or [10] * len(seconds)

    def taken(begin: int, end: int, in_flight: int) -> int:
        return sum(sizes[begin:end]) + in_flight * (end - begin)

    return LayerTimes([f"layer {k}" for k in range(len(seconds))], seconds, leaving or [4] * len(seconds), taken)


def hosts(*links: tuple[str, str], **machines: dict[str, object]) -> Hosts:
    return Hosts.model_validate(
        {
            "hosts": {name: {"memory": 10**6, **keys} for name, keys in machines.items()},
            "links": [{"between": list(link), **LINK} for link in links],
        }
    )


def slowest_of_all(model: LayerTimes, machines: Hosts, stages: int) -> float | None:
    """By looking at every cut and every order of machines."""
    found = []
    names = list(machines.hosts)
    for cut in combinations(range(1, model.count), stages - 1):
        edges = [0, *cut, model.count]
        for chosen in product(names, repeat=stages):
            if any(chosen.count(name) > machines.hosts[name].workers for name in names):
                continue
            if not (machines.hosts[chosen[0]].data and machines.hosts[chosen[-1]].data):
                continue
            times = [
                sum(model.seconds[begin:end]) / machines.hosts[name].speed
                for name, (begin, end) in zip(chosen, pairwise(edges), strict=True)
            ]
            room = all(
                model.taken(begin, end, stages - place) <= machines.hosts[name].memory
                for place, (name, (begin, end)) in enumerate(zip(chosen, pairwise(edges), strict=True))
            )
            joined = [machines.link(*pair) for pair in pairwise(chosen) if pair[0] != pair[1]]
            at = [edge for edge, pair in zip(cut, pairwise(chosen), strict=True) if pair[0] != pair[1]]
            if room and all(link is not None for link in joined):
                carrying = [
                    model.leaving[edge - 1] / link.bandwidth
                    for edge, link in zip(at, joined, strict=True)
                    if link is not None
                ]
                found.append(max([*times, *carrying]))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_chain_is_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    model = layers(
        [chance.uniform(0.1, 3) for _ in range(count)],
        [chance.randint(1, 20) for _ in range(count)],
        [chance.randint(1, 3000) for _ in range(count)],
    )
    names = ["a", "b", "c"][: chance.randint(1, 3)]
    machines = hosts(
        *[pair for pair in combinations(names, 2) if chance.random() < 0.7],
        **{
            name: {
                "speed": chance.choice([0.5, 1.0, 3.0]),
                "memory": chance.choice([15, 40, 1000]),
                "workers": chance.randint(1, 2),
                "data": name == "a" or chance.random() < 0.5,
            }
            for name in names
        },
    )
    for stages in range(1, count + 1):
        found = ChainSearch(model, machines).best(stages)
        assert (None if found is None else pytest.approx(found.slowest)) == slowest_of_all(model, machines, stages)


def test_a_fast_machine_gets_more_layers_and_none_of_the_data() -> None:
    model = layers([1.0] * 6)
    found = fit(model, hosts(("a", "b"), a={"workers": 2}, b={"speed": 4.0, "data": False}), 8)
    assert [(stage.host, stage.first_layer, len(stage.layers)) for stage in found.stages] == [
        ("a", 0, 1),
        ("b", 1, 4),
        ("a", 5, 1),
    ]


def test_latency_is_hidden_by_more_microbatches_in_flight_if_memory_has_room() -> None:
    model = layers([0.01] * 4, leaving=[1] * 4)
    machines = {"latency": 0.08, "bandwidth": 1e9}
    wide = Hosts.model_validate(
        {"hosts": {"a": {"memory": 10**6}, "b": {"memory": 10**6}}, "links": [{"between": ["a", "b"], **machines}]}
    )
    found = fit(model, wide, 64)
    assert (found.schedule, len(found.stages)) == ("window", 2)
    assert found.stages[0].in_flight > 4
    narrow = wide.model_copy(
        update={"hosts": {name: host.model_copy(update={"memory": 25}) for name, host in wide.hosts.items()}}
    )
    found = fit(model, narrow, 64)
    assert found.schedule == "1f1b"
    assert [way.schedule for way in found.ways if way.seconds is None] == ["eager-1f1b", "window"]


def test_one_stage_is_best_where_links_are_slow() -> None:
    found = fit(layers([0.001] * 4), hosts(("a", "b"), a={}, b={}), 4)
    assert [stage.host for stage in found.stages] == ["a"]


def test_memory_in_the_way_is_named_with_the_stage_and_by_how_much() -> None:
    with pytest.raises(NoFit) as refused:
        fit(layers([1.0] * 4), hosts(("a", "b"), a={"memory": 20}, b={"memory": 20}), 4)
    assert str(refused.value) == (
        "memory: no cut and no order of machines fits. With 21 % more on each it would: stage 0, of layers layer 0 to "
        'layer 1, would then take 24 bytes at "b", which has 20 for each worker. Give a host more memory or more '
        "workers, add a host, or take smaller microbatches [SL108]"
    )


def test_links_in_the_way_are_named() -> None:
    with pytest.raises(NoFit, match=r'links: .* no link between "a" and "b"\. Add \[\[links\]\]'):
        fit(layers([1.0] * 4), hosts(a={"memory": 30}, b={"memory": 30}), 4)
