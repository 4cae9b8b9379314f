"""Network namespaces with a relay that delays and loses packets: a bad network on one machine, for root on Linux.

    with LossyNetwork(count, delay=0.04, jitter=0.02, loss=0.02) as network:
        subprocess.run([*network.inside(2), "ping", network.address(0)])

Every namespace has its own TUN device. The relay runs in user space: it reads all packets, drops a share of them and
forwards the others late and in order. So no kernel with `tc netem` is needed.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
import uuid
from types import TracebackType

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
LARGEST_PACKET = 65_536


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class LossyNetwork:
    """`count` namespaces, each with an address in 10.77.0.0/24 and its own loopback."""

    def __init__(self, count: int, delay: float, jitter: float, loss: float) -> None:
        self._tag = uuid.uuid4().hex[:6]
        self._names = [f"sifu-{self._tag}-{number}" for number in range(count)]
        self._how = [str(delay), str(jitter), str(loss)]
        self._relay: subprocess.Popen[bytes] | None = None

    def address(self, number: int) -> str:
        """Return the address of a namespace, as the others see it."""
        return f"10.77.0.{number + 1}"

    def inside(self, number: int) -> list[str]:
        """Return the command prefix that runs a command in a namespace."""
        return ["ip", "netns", "exec", self._names[number]]

    def __enter__(self) -> LossyNetwork:
        for name in self._names:
            _ip("netns", "add", name)
        self._relay = subprocess.Popen(
            [sys.executable, __file__, self._tag, *self._how, *self._names], stdout=subprocess.PIPE
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise RuntimeError("the relay of the network could not be started: it needs root, ip and /dev/net/tun")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._relay is not None:
            self._relay.terminate()
            self._relay.wait(timeout=30)
        for name in self._names:
            _ip("netns", "delete", name)


def _device(tag: str, number: int, namespace: str) -> int:
    """Return the relay's end of a namespace's TUN device."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"s{tag}{number}"
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "address", "add", f"10.77.0.{number + 1}/24", "dev", name)
    _ip("-n", namespace, "link", "set", name, "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    return end


def relay(tag: str, delay: float, jitter: float, loss: float, namespaces: list[str]) -> None:
    """Forward packets between namespaces until this process is ended."""
    ends = [_device(tag, number, namespace) for number, namespace in enumerate(namespaces)]
    print("ready", flush=True)
    on_the_way: list[tuple[float, int, int, bytes]] = []
    latest = [0.0] * len(ends)
    count = 0
    while True:
        pause = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        readable, _, _ = select.select(ends, [], [], pause)
        for end in readable:
            packet = os.read(end, LARGEST_PACKET)
            to = packet[19] - 1 if packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00" else -1
            if 0 <= to < len(ends) and random.random() >= loss:
                latest[to] = max(latest[to], time.monotonic() + delay + random.random() * jitter)
                count += 1
                heapq.heappush(on_the_way, (latest[to], count, to, packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(on_the_way)
            try:
                os.write(ends[to], packet)
            except OSError:  # a full queue also loses packets
                continue


if __name__ == "__main__":
    relay(sys.argv[1], *(float(word) for word in sys.argv[2:5]), sys.argv[5:])
