"""What holds for every test: how hypothesis searches."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# No deadline: on a busy machine an example may take any time, and a timed test is no test.
# In CI every run tries the same examples, so that a change is judged by itself.
settings.register_profile("kvpair", deadline=None)
settings.register_profile("kvpair-ci", deadline=None, derandomize=True)
settings.load_profile("kvpair-ci" if os.environ.get("CI") else "kvpair")

# A shell's background job ignores Ctrl-C, and so would every program that a test starts to see it
# stopped.  A handler of ours here is the default in what we start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
