"""Faults in a run: their effects on its processes, its connections and the broker's records."""

from functools import partial
from typing import TYPE_CHECKING

from simulation.broker import SimulatedBroker
from simulation.scenario import Injection, PlannedFault
from stageline.broker.control.leaves import LeaveWorker

if TYPE_CHECKING:
    from simulation.world import World


def strike(world: "World", injection: Injection) -> bool:
    """Carries out `injection`; whether there was anything to strike."""
    match injection.fault:
        case PlannedFault.KILL:
            return _kill(world, injection.number)
        case PlannedFault.KILL_ALL:
            return _kill_all(world)
        case PlannedFault.KILL_SCRIPT:
            return world.kill_script()
        case PlannedFault.PAUSE_SCRIPT:
            return world.pause_script(injection.seconds)
        case PlannedFault.LOSE_DISK:
            return _lose_disks(world, 1)
        case PlannedFault.LOSE_DISKS:
            return _lose_disks(world, 2)
        case PlannedFault.PAUSE:
            return _pause(world, injection.seconds)
        case PlannedFault.HANG:
            return _hang(world, injection.seconds)
        case PlannedFault.PAUSE_RUN:
            return world.pauses.pause(injection.seconds)
        case PlannedFault.LEAVE:
            return _leave(world, injection.seconds)
        case PlannedFault.DRAIN:
            return _drain(world, injection.seconds)
        case PlannedFault.PARTITION:
            return _part(world, injection)
        case PlannedFault.RESUME:
            world.resume()
            return True
        case PlannedFault.CUT:
            return sum(world.environment.network.cut_one() for _ in range(injection.number)) > 0
        case _:
            return world.broker.alive and _strike_broker(world, injection)


def _strike_broker(world: "World", injection: Injection) -> bool:
    match injection.fault:
        case PlannedFault.REVOKE:
            return _revoke(world, world.broker)
        case PlannedFault.KILL_BROKER_WRITING:
            world.store.fuse, world.store.before = injection.number, world.environment.rng.random() < 0.5
        case PlannedFault.LOSE_RECORDS:
            world.lose_records()
        case PlannedFault.OLD_RECORDS:
            world.keep_copy_of_records(injection.seconds)
        case PlannedFault.POWER:
            world.fail_power(injection.seconds, then=partial(_kill_all, world))
        case _:
            world.broker.end(-9)
    return True


def _revoke(world: "World", broker: SimulatedBroker) -> bool:
    """Another machine comes in place of the one that is shut out."""
    victims = world.environment.rng.sample(world.workers, min(1, len(world.workers)))
    for victim in victims:
        broker.shut_out(victim)
        victim.end(-9)
    world.environment.network.cut_all(broker)
    return bool(victims)


def _kill(world: "World", number: int) -> bool:
    victims = world.environment.rng.sample(world.workers, min(number, len(world.workers)))
    for victim in victims:
        victim.end(-9)
    return bool(victims)


def _lose_disks(world: "World", number: int) -> bool:
    """The disks of so many workers, each of which holds the copies of the one before it."""
    placed = sorted((worker for worker in world.workers if worker.place is not None), key=lambda worker: worker.place)
    if len(placed) < number:
        return False
    first = world.environment.rng.randrange(len(placed))
    for victim in (placed * 2)[first : first + number]:
        victim.end(-9)
        world.environment.disks.lose(victim.host)
    return True


def _kill_all(world: "World") -> bool:
    return _kill(world, len(world.workers))


def _pause(world: "World", seconds: float) -> bool:
    if world.workers:
        world.environment.rng.choice(world.workers).pause(seconds)
    return bool(world.workers)


def _hang(world: "World", seconds: float) -> bool:
    working = [worker for worker in world.workers if worker.loop is not None]
    if working:
        world.environment.rng.choice(working).hang += seconds
    return bool(working)


def _leave(world: "World", seconds: float) -> bool:
    """A signal to its process: one that has no place yet is not heard."""
    working = [worker for worker in world.workers if worker.control is not None and worker.incarnation]
    if working:
        world.environment.rng.choice(working).control.leave(seconds, "a signal")
    return bool(working)


def _drain(world: "World", seconds: float) -> bool:
    there = world.broker.alive
    if there:
        index = world.environment.rng.randrange(len(world.scenario.schedule.placement))
        world.broker.note(LeaveWorker("ada", index, seconds))
    return there


def _part(world: "World", injection: Injection) -> bool:
    rng = world.environment.rng
    hosts = sorted({process.host for process in (*world.workers, *world.scripts, world.broker)})
    parted = frozenset(rng.sample(hosts, min(len(hosts) - 1, injection.number)))
    world.environment.network.part(parted, injection.seconds, cut=rng.random() < 0.5)
    return bool(parted)
