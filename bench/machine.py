"""What the machine itself can do, and what a process has used."""

import os
import resource
import threading
import time

import numpy as np


def read_bandwidth(size: int = 512 << 20, repeats: int = 5) -> float:
    """GB/s at which all cores together read `size` bytes: the best of `repeats`. One dot product a core over its own part."""
    cores = os.cpu_count() or 1
    parts = [np.ones(size // 4 // cores, np.float32) for _ in range(cores)]
    best = 0.0
    for _ in range(repeats):
        threads = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - start) / 1e9)
    return best


def peak_memory() -> int:
    """Bytes: the largest resident size of this process so far. Linux only: elsewhere ru_maxrss has another unit."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_since_process_start() -> float:
    """Seconds since the operating system started this process, good to about 10 ms. Linux only: reads /proc."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
