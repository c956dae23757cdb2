"""The store in memory gives back what any other store would: JSON's own types, and nothing shared with the caller."""

from stageline.broker.stores.base import MemoryStore


def test_a_fact_comes_back_as_json_types_whatever_the_caller_does_to_it_later():
    store, stages = MemoryStore(), [0, 1]
    store.put("registry", {"stages": stages, "place": (1, 2)})
    stages.append(2)
    assert store.load().facts == {"registry": {"stages": [0, 1], "place": [1, 2]}}


def test_what_was_loaded_can_be_changed_without_changing_the_store():
    store = MemoryStore()
    store.put("run", {"id": "run-1"})
    store.load().facts["run"]["id"] = "another"
    assert store.load().facts["run"] == {"id": "run-1"}
