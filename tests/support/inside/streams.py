"""Holds several streams open at once and says how each one ended; run inside a test's machine.

    python streams.py NUM_STREAMS MAX_TOKENS

prints `running` once every stream has tokens from decoded, and at the end one JSON object a stream:
{"ids": number of tokens, "reason": why END came, or "error": what came instead}.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from protocol.client import Client
from protocol.messages import Accepted, End, Tokens

SOCKET = "/run/kvpair/prefilld.sock"
TIMEOUT_S = 80.0


class Stream:
    """One request, on a thread of its own."""

    def __init__(self, index: int, max_tokens: int) -> None:
        self._index, self._max_tokens = index, max_tokens
        self.is_running = threading.Event()
        self.outcome: dict[str, object] = {}
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        num_ids = 0
        try:
            client = Client(SOCKET, timeout_s=TIMEOUT_S)
            prompt = f"secret words of stream {self._index}"
            # Another id each time: one that saw several deaths of decoded is held for their cause.
            name = f"stream-{os.getpid()}-{self._index}"
            with client.stream(
                prompt, id=name, max_tokens=self._max_tokens, ignore_eos=True
            ) as stream:
                for event in stream:
                    match event:
                        case Accepted():
                            pass
                        case Tokens(ids=ids):
                            num_ids += len(ids)
                            if num_ids > 1:  # the first is prefilld's
                                self.is_running.set()
                        case End(reason=reason):
                            self.outcome["reason"] = reason
        except Exception as error:
            self.outcome["error"] = f"{type(error).__name__}: {error}"
        self.outcome["ids"] = num_ids
        self.is_running.set()


def main() -> None:
    """Run the streams."""
    num_streams, max_tokens = (int(argument) for argument in sys.argv[1:])
    streams = [Stream(index, max_tokens) for index in range(num_streams)]
    for stream in streams:
        stream.is_running.wait()
    print("running", flush=True)
    for stream in streams:
        stream.thread.join()
        print(json.dumps(stream.outcome), flush=True)


if __name__ == "__main__":
    main()
