"""Load on a running server: many streams at once, a third of which the clients drop, and how long /health takes meanwhile.

    python benchmarks/server_health.py --port 8000 [--streams 500] [--seconds 30] [--api-key KEY]

/health is asked ten times a second, on a new connection each time as probes do, from a process of its own: what the clients
take is not counted as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection


class Load:
    """Clients that ask again until the time is over."""

    def __init__(self, port: int, streams: int, key: str | None) -> None:
        self._port = port
        self._streams = streams
        self._key = key
        self.ended: Counter[str] = Counter()
        self.events = 0

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(i, deadline) for i in range(self._streams)))

    async def _client(self, index: int, deadline: float) -> None:
        chance = random.Random(index)
        while time.monotonic() < deadline:
            leaves_after = chance.randint(0, 6) if chance.random() < 1 / 3 else None
            self.ended[await self._request(chance, leaves_after)] += 1

    async def _request(self, chance: random.Random, leaves_after: int | None) -> str:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "x" * chance.randint(1, 40)}],
                "stream": True,
                "max_tokens": chance.randint(1, 24),
                "temperature": chance.choice([0.5, 1.0]),
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                + f"{key}Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            lines = 0
            last = b""
            while line := (await reader.readline()):
                last = line.strip() or last
                lines += line.startswith(b"data: ")
                if leaves_after is not None and lines >= leaves_after:
                    return "left"
            self.events += lines
            return "done" if last in (b"data: [DONE]", b"0") else f"broken {last!r}"
        finally:
            writer.close()


def probe(port: int, seconds: float, results: Connection) -> None:
    """How long each answer of /health took, in seconds."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while (started := time.monotonic()) < end:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        if b" 200 " not in answer[:16]:
            raise SystemExit(f"/health: {answer[:80]!r}")
        took.append(time.monotonic() - started)
        time.sleep(0.1)
    results.send(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--api-key")
    args = parser.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    prober = multiprocessing.Process(target=probe, args=(args.port, args.seconds, sender), daemon=True)
    prober.start()
    sender.close()
    load = Load(args.port, args.streams, args.api_key)
    asyncio.run(load.run(args.seconds))
    took = receiver.recv()  # EOFError if the prober broke
    ended, events = dict(load.ended), load.events
    took.sort()
    print(
        json.dumps(
            {
                "streams": args.streams,
                "ended": ended,
                "events": events,
                "health_probes": len(took),
                "health_ms_median": round(1e3 * statistics.median(took), 1),
                "health_ms_p99": round(1e3 * took[int(0.99 * (len(took) - 1))], 1),
                "health_ms_max": round(1e3 * took[-1], 1),
            }
        )
    )
    sys.exit(any(name not in ("done", "left") for name in ended))


if __name__ == "__main__":
    main()
