"""One valid message of every type, to push through codecs, connections and sockets."""

from __future__ import annotations

from protocol import messages as m

EPOCH = bytes(range(16))
OTHER_EPOCH = bytes(16)

CREDITS = m.Credits(free_blocks=100, free_sequences=4, queue_depth=0, seen=2)
INSTANCE = m.Instance(boot_id="b", pid=7, start_time=9, pid_namespace=11, shm_device=13)
USAGE = m.Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=2)
TIMINGS = m.Timings(queue=0.1, prefill=2.0, decode=3.0, total=5.1)
REQUEST = m.RequestState(
    id="r-1",
    prompt_tokens=5,
    cached_tokens=0,
    ids=[42],
    delivered=1,
    resumed=0,
    max_tokens=64,
    sampling=m.Sampling(seed=1),
    stop=[],
    stop_ids=[2],
    stream=True,
    arrived_ns=1,
    started_ns=2,
    first_token_ns=3,
)
RESUME = m.Resume(attempt=1, seed=1, fingerprint="f", ids=[42])

_ALL: list[m.Message] = [
    m.Generate(prompt="Why?", sampling=m.Sampling(temperature=0.5), stop=["\n"], resume=RESUME),
    m.Check(prompt=[1, 2, 3]),
    m.Cancel(),
    m.StatusRequest(),
    m.MetricsRequest(),
    m.Accepted(id="r-1", seed=1, prompt_tokens=5, cached_tokens=0, fingerprint="f"),
    m.Tokens(index=0, ids=[42], text="Because"),
    m.End(reason="stop", usage=USAGE, timings_ms=TIMINGS),
    m.Error(code="busy", message="come back later", retryable=True, retry_after_ms=250),
    m.Checked(prompt_tokens=3, max_tokens=64, blocks=1, total_blocks=5, fits=True),
    m.Status(status={"state": "serving", "pool": {"free": 3}, "list": [1, 0.5, None, True]}),
    m.Metrics(text="kvpair_requests_total 1\n"),
    m.Hello(
        version=1,
        instance=INSTANCE,
        epoch=EPOCH,
        backend="memfd",
        device="cpu",
        fingerprint="f",
        fields={"layers": 30, "dtype": "float32", "theta": 1e5, "tied": True},
    ),
    m.Welcome(instance=INSTANCE, access="pull", held=[1, 2], pool_blocks=64, credits=CREDITS),
    m.Refuse(code="link-busy", field="link", ours="one", theirs="two", message="wait"),
    m.Map(pool_bytes=1 << 20, offset=0, num_blocks=16, control_slots=64, proof_bytes=4096),
    m.Mapped(digest=bytes(32), bandwidth_gb_s=9.5, credits=CREDITS),
    m.Chunk(epoch=EPOCH, lease=1, slot=0, generation=1, first=0, blocks=[1, 2], total_blocks=6),
    m.NoChunk(epoch=EPOCH, lease=1, credits=CREDITS),
    m.Handoff(
        epoch=EPOCH,
        lease=1,
        slot=0,
        generation=1,
        blocks=[1, 2],
        num_tokens=17,
        total_blocks=6,
        request=REQUEST,
        residue=b"\x00\x00",
        sent_ns=4,
    ),
    m.Adopt(epoch=EPOCH, lease=1, credits=CREDITS),
    m.Reject(epoch=EPOCH, lease=1, code="fd-lost", message="none came", credits=CREDITS),
    m.Abort(epoch=EPOCH, lease=1),
    m.Release(epoch=EPOCH, lease=1, credits=CREDITS),
    m.CreditUpdate(credits=CREDITS),
    m.Ping(sent_ns=5),
    m.Pong(sent_ns=5, credits=CREDITS),
    m.Drain(),
    m.Bye(),
]

SAMPLES: dict[type[m.Message], m.Message] = {type(message): message for message in _ALL}
"""By type; `test_messages.py` checks that none is missing."""
