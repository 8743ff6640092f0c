"""Standard logging of plans and collectives, switched on by the variable `FSHARD_LOGS`.

`FSHARD_LOGS=plan,comm python script.py` prints every program when it is planned, and every
collective of this process when it is launched, to standard error. The loggers are `fshard.plan` and
`fshard.comm`, with records of level DEBUG. Plans are logged as soon as their logger is enabled;
collectives need the variable, because nothing watches them otherwise.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from fshard._util.errors import did_you_mean, fail
from fshard._util.text import bytes_text
from fshard.run.transports.base import ObservedCall, observe
from fshard.show.comm.origin import origin_of

LOGS = ("plan", "comm")
COMM_LOGGER = logging.getLogger("fshard.comm")
_OBSERVED = ExitStack()


def configure_logs(variable: str) -> None:
    """Print the logs that the value of `FSHARD_LOGS` names; raise `ShardingError` for others."""
    names = [name.strip() for name in variable.split(",") if name.strip()]
    if unknown := [name for name in names if name not in LOGS]:
        fail("FSHARD_LOGS", repr(variable), f"names must be among {', '.join(LOGS)}",
             did_you_mean(unknown[0], LOGS, "FSHARD_LOGS=plan,comm"))  # fmt: skip
    for name in names:
        logger = logging.getLogger(f"fshard.{name}")
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
    if "comm" in names:
        _OBSERVED.enter_context(observe(_log))


def _log(call: ObservedCall) -> None:
    origin = origin_of(call)
    module = f" in {origin.module}" if origin.module else ""
    for event in call.events:
        COMM_LOGGER.debug(
            "rank %s: %s over %s, %s sent, %s, %s%s at %s", event.rank, event.op,
            ", ".join(event.axes) or "(between meshes)", bytes_text(event.nbytes), event.phase,
            origin.call, module, origin.line,
        )  # fmt: skip


if "FSHARD_LOGS" in os.environ:
    configure_logs(os.environ["FSHARD_LOGS"])
