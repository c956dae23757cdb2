"""What befalls a run: what each fault does to its processes, its connections and the broker's records."""

from functools import partial
from typing import TYPE_CHECKING

from simulation.scenario import Blow, Fault

if TYPE_CHECKING:
    from simulation.world import World


def strike(world: "World", blow: Blow) -> bool:
    """Carries out `blow`; whether there was anything to strike."""
    match blow.fault:
        case Fault.KILL:
            return _kill(world, blow.number)
        case Fault.KILL_ALL:
            return _kill_all(world)
        case Fault.PAUSE:
            return _pause(world, blow.seconds)
        case Fault.HANG:
            return _hang(world, blow.seconds)
        case Fault.PARTITION:
            return _part(world, blow)
        case Fault.RESUME:
            world.resume()
            return True
        case Fault.CUT:
            return sum(world.around.network.cut_one() for _ in range(blow.number)) > 0
        case _:
            return world.broker.alive and _strike_broker(world, blow)


def _strike_broker(world: "World", blow: Blow) -> bool:
    match blow.fault:
        case Fault.KILL_BROKER_WRITING:
            world.store.fuse, world.store.before = blow.number, world.around.dice.random() < 0.5
        case Fault.LOSE_RECORDS:
            world.lose_records()
        case Fault.OLD_RECORDS:
            world.keep_copy_of_records(blow.seconds)
        case Fault.POWER:
            world.keep_copy_of_records(blow.seconds, then=partial(_kill_all, world))
        case _:
            world.broker.end(-9)
    return True


def _kill(world: "World", number: int) -> bool:
    victims = world.around.dice.sample(world.workers, min(number, len(world.workers)))
    for victim in victims:
        victim.end(-9)
    return bool(victims)


def _kill_all(world: "World") -> bool:
    return _kill(world, len(world.workers))


def _pause(world: "World", seconds: float) -> bool:
    if world.workers:
        world.around.dice.choice(world.workers).pause(seconds)
    return bool(world.workers)


def _hang(world: "World", seconds: float) -> bool:
    loops = [worker.loop for worker in world.workers if worker.loop is not None]
    if loops:
        world.around.dice.choice(loops).hang += seconds
    return bool(loops)


def _part(world: "World", blow: Blow) -> bool:
    dice = world.around.dice
    hosts = sorted({worker.host for worker in world.workers} | {world.broker.host})
    parted = frozenset(dice.sample(hosts, min(len(hosts) - 1, blow.number)))
    world.around.network.part(parted, blow.seconds, cut=dice.random() < 0.5)
    return bool(parted)
