"""A trainer that kills itself, as a process of its own: publishes version 0, then dies at a step of version 1 or of its claim.

Arguments: log URL, store URL, step, and `claim` or `publish`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from stitch.trainer.attempt import Progress, Step
from stitch.trainer.publisher import Publisher
from tests.trainer.places import POLICY, weights


def main(log: str, store: str, step: str, phase: str) -> None:
    armed = phase == "claim"

    def listen(progress: Progress) -> None:
        if armed and progress.step is Step(step):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # until the signal is there

    with Publisher.open(policy=POLICY, run="r1", log=log, store=store, progress=listen) as pub:
        number = pub.next_number
        pub.publish(weights(0), number)
        armed = True
        pub.publish(weights(1), number + 1, metadata={"by": "the dead"})
    sys.exit("it was to die")


if __name__ == "__main__":
    main(*sys.argv[1:])
