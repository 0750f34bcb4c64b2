"""Every bound of the protocol, each with its unit and its reason.  Change one, change `VERSION`."""

from __future__ import annotations

VERSION = 4
"""Version of the protocol; both ends of a link must speak the same one.

1: the first.
2: min-p, penalties, bias, shortest answers and log-probabilities.
3: CHUNK may tell decoded's first step, and the control page the first token; decoded reserves room
   for a prompt, and no longer for its whole answer; `preempted`.
4: HANDOFF tells how long the prompt took the GPU, and END what the GPUs' clocks say.
"""

MAX_LINK_BODY_BYTES = 1 << 20
"""Largest body on the link between the daemons, in bytes.

The largest is a HANDOFF: 8,192 block ids of at most 5 bytes (131,072 tokens in 16-token
blocks) are 40 KiB; stop strings, residue, bias and the prompt's tokens at most 208 KiB more.
1 MiB leaves room and bounds what a broken peer makes us buffer.
"""

DEFAULT_MAX_REQUEST_BYTES = 4 << 20
"""Largest body that a daemon accepts from a client unless its configuration says otherwise.

131,072 prompt tokens are about 0.6 MiB of text, or 0.4 MiB as token ids; 4 MiB is several
times that in a script of four-byte characters.
"""

MAX_REPLY_BODY_BYTES = 4 << 20
"""Largest body that a client accepts from a daemon: a whole unstreamed answer, or METRICS."""

MAX_ARRAY_LENGTH = 1 << 20
"""Most elements in one msgpack array: a prompt of token ids is the longest array."""

MAX_MAP_LENGTH = 4096
"""Most entries in one msgpack map.  No message has more than 64 keys; STATUS nests maps."""

MAX_STATUS_DEPTH = 8
"""Deepest nesting of STATUS, the one message with a free form; daemons use four levels."""

MAX_BLOCKS = 65_536
"""Most block ids in one message: 1,048,576 tokens in 16-token blocks."""

MAX_TOKENS = 1 << 20
"""Most tokens that a request may ask for or carry; the model's context is checked as well."""

MAX_TOKEN_ID = (1 << 31) - 1
"""Largest token id: engines index vocabularies with 32-bit integers."""

MAX_MESSAGES = 4096
"""Most chat messages in one request."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
"""Bounds on stop strings: each holds back that much text, and is searched at every token."""

MAX_STOP_IDS = 256
MAX_TOP_K = 1 << 20
MAX_TEMPERATURE = 100.0

MAX_ATTEMPT = 100
"""Largest count of an answer's resumptions; clients give up long before it, and then keep it."""

MAX_PENALTY = 100.0
"""Largest penalty and bias either way: logits lie within some tens, so this decides any choice,
and what is computed with it stays finite."""

MIN_REPETITION_PENALTY = 0.01
"""Smallest repetition penalty, the inverse of the largest."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias of their own: 23 KiB in a HANDOFF."""

MAX_TOP_LOGPROBS = 20
"""Most alternatives told beside each token: at 14 bytes each, many times the token itself."""

MAX_LOGPROBS_PER_FRAME = 8192
"""Most ids in a TOKENS that tells log-probabilities: 2.5 MiB with all alternatives, which leaves
room for their text.  A longer run leaves as several frames."""

MAX_TOKEN_BITMAP_BYTES = 65_536
"""Longest set of tokens, one bit each: a vocabulary of 524,288, twice the largest in use."""

MAX_SEED = (1 << 63) - 1
"""Seeds are non-negative and fit a signed 64-bit integer, as torch and TOML both want."""

MAX_FOLLOW_UP_BYTES = 1024
"""Largest body from a client behind its request: CANCEL is 14 bytes, and nothing else is legal.

It also bounds the half frame that may have to travel in a HANDOFF.
"""

MAX_RESIDUE_BYTES = 65_536
"""Most client bytes that were read but not parsed and so travel in a HANDOFF.

A connection carries one request, so after GENERATE only a CANCEL (14 bytes) is legal.
"""

EPOCH_BYTES = 16
"""An epoch is 128 random bits: two incarnations of a pool never share one."""

MAX_CONTROL_SLOTS = 65_536
"""Most lease slots on a control page: eight bytes each, half a mebibyte in all."""

MAX_QUEUE_BYTES = 8 << 20
"""Most bytes that wait for one reader before its connection is closed as `slow`: twice the
largest frame, so that no single message can be too much.
"""

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket: `sun_path` has 108 bytes, the last one is NUL."""
