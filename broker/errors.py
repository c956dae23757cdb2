"""Errors of the broker package: what can go wrong between workers, and on which side."""

from stageline.pipeline.errors import ExitCode, StagelineError


class BrokerError(StagelineError):
    """Base of the errors that this package raises on purpose."""


class BadMessage(BrokerError):
    """Error that what arrived is not a valid message: damaged, or too large.

    Mend: Nothing if it happens once: the message is sent again. If it repeats, look at the network, or for other
    programs that send to this port.

    Example: a header of 70000 bytes, the limit is 65536
    """

    error_code = "SL301"


class Unsendable(BrokerError):
    """Error that a stage's output holds a value that cannot travel.

    Mend: Let the stage return tensors, numbers and texts in tuples, lists and dicts; raise the limit that the message
    names if it is one.

    Example: forward-1 (step 0, microbatch 3) has a header of 70000 bytes, the limit is 65536
    """

    error_code = "SL303"


class Disagreement(BrokerError):
    """Error that two messages of one identity have different bits: their computation is not deterministic.

    Mend: See that all operations are deterministic (`stageline doctor`), and that software, hardware type and thread
    count are the same wherever the stage runs.

    Example: message 12 of forward-1 came twice with different bits: what computed it was not deterministic. See that
    all operations are, and that software, hardware type and thread count are the same wherever the stage runs
    """

    error_code = "SL305"


class QueueGap(BrokerError):
    """Error that a message skips a number of its queue: its sender lost one or sent out of order.

    Mend: Resume the run as a whole, and report it if no stage was resumed by itself.

    Example: message 12 of forward-1 is no longer available: its producer keeps those from 20 on.
    """

    error_code = "SL901"


class QueueFull(BrokerError):
    """Error that a queue holds as much as it may, and waiting makes no room.

    Mend: Resume the run with a larger `queues.retain_bytes` or more disk, or with checkpoints more often
    (`recovery.snapshot_every`).

    Example: forward-1 retains 120 messages, 4000000 bytes, until every stage is past step 12; memory for it is full,
    and the disk takes no more in runs/a: No space left on device.
    """

    error_code = "SL306"


class QueueClosed(BrokerError):
    """Error that an end of a queue was used after it was closed.

    Mend: In code of your own that uses queues: use them before their `with` ends.

    Example: the queues of incarnation 3 in run 'a' are closed
    """

    error_code = "SL307"


class Fenced(BrokerError):
    """Error that a newer process has the worker's place: this one was replaced, and stops.

    Mend: Nothing: the run goes on with the other process. If it should not have been replaced, raise `recovery.lease`.

    Example: forward-1 is taken by incarnation 5 now; this worker is incarnation 3 and must stop
    """

    error_code = "SL308"


class EndpointTaken(BrokerError):
    """Error that an address cannot be bound: a port is in use, or is not this machine's.

    Mend: Stop the process that the message names, or give another port; port 0 takes a free one.

    Example: cannot listen at tcp://127.0.0.1:7000: it is in use by pid 812; stop that process, or listen at another
    port (0 takes any that is free)
    """

    error_code = "SL309"


class AddressUnusable(BrokerError):
    """Error that the address of the broker cannot be used.

    Mend: Write it as `tcp://host:port`, `ipc:///path` or `redis://host:6379/0#name`, in the plan or after `--broker`.

    Example: cannot use tcp://desk: Invalid argument
    """

    error_code = "SL310"


class ForeignMessage(BadMessage):
    """Error that an intact message is of another run or version: a resend would bring the same bytes.

    Mend: Give each run queues of its own (`queues.url`), and install one version of stageline on every machine.

    Example: the message has wire version 6, this side has 7; install the same version of stageline on every machine
    """

    error_code = "SL302"


class Overwritten(BrokerError):
    """Error that a tensor was written to after it was sent: a resend would have other bits.

    Mend: Let the stage's output be a tensor of its own: `.clone()` it.

    Example: a tensor of forward-1 0/3 was written to in place after it was put, and its message may be needed again as
    it was: let the stage's output be a tensor of its own (.clone() it)
    """

    error_code = "SL304"


class BadKey(BrokerError):
    """Error that a text is not a public key.

    Mend: Copy the key again, from `k1.` on: it has 46 characters.

    Example: 'k1.2n8Fh0XQ...' is not a public key: it has 42 characters after k1., expected 43. Copy it again
    """

    error_code = "SL601"
    exit_code = ExitCode.NOT_ADMITTED


class BadJoinLine(BrokerError):
    """Error that a text is not the whole line by which a machine joins a run.

    Mend: Copy the whole line that the broker printed, in single quotes: shells give `#` a meaning of its own.

    Example: the join line tcp://desk:7000#... is cut off: its check has 2 characters, expected 6. Copy the whole line
    that the broker printed, in single quotes
    """

    error_code = "SL602"
    exit_code = ExitCode.NOT_ADMITTED


class NotEnrolled(BrokerError):
    """Error that the broker does not take this machine's key.

    Mend: Ask for another invitation, which `stageline keys invite` prints on the broker's machine, or have the key
    admitted there with `stageline keys admit`.

    Example: this invitation has ended: ask for another, which `stageline keys invite` prints on the broker's machine
    """

    error_code = "SL603"
    exit_code = ExitCode.NOT_ADMITTED
