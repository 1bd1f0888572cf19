"""Makes processes that store, load and remove until they are killed. Run by ``test_crash.py``.

Reads lines ``DIRECTORY MODE PACK SEED``. For each, it forks a process that prints its id and each chunk that it loads with
wrong contents; when the process has ended, prints its exit status. To start an interpreter for each would take longer than the
test.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from random import Random

from cargohold.tiers import LoadOutcome
from cargohold.tiers.disk import DiskTier
from tests.tiers.common import CHUNK, codec, disk_tier, key, payload

NUM_KEYS = 150
MAX_BYTES = 1024**2


def work(tier: DiskTier, seed: int) -> None:
    random = Random(seed)
    into = bytearray(CHUNK)
    while True:
        number = random.randrange(NUM_KEYS)
        match random.randrange(10):
            case 0:
                tier.remove([key(number)])
            case 1 | 2 | 3:
                if tier.load(key(number), memoryview(into)) is LoadOutcome.LOADED and into != payload(number):
                    say(f"wrong {number}")
            case _:
                tier.store(key(number), memoryview(payload(number)), key(number - 1) if number % 8 else None)


def run(directory: str, mode: str, pack: str, seed: str) -> None:
    using = codec(packs=pack == "exponent")
    tier = disk_tier(Path(directory), MAX_BYTES, using=using, direct_io=mode == "direct")
    for thread in range(3):
        threading.Thread(target=work, args=(tier, 100 * int(seed) + thread), daemon=True).start()
    say(str(os.getpid()))
    threading.Event().wait()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    for number in range(NUM_KEYS):  # so that no child spends its short life on this
        codec(packs=True).encode(key(number), memoryview(payload(number)), None)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*line.split())
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
