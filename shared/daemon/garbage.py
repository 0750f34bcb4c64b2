"""Keeps the garbage collector from walking over what will never be garbage."""

from __future__ import annotations

import gc


def freeze_startup_objects() -> None:
    """Take everything that exists now out of the collector's sight; once, when all is loaded.

    Modules, weights' handles, vocabularies: some 10^6 objects that live as long as the process.  A
    full collection over them takes tens of milliseconds, in the middle of somebody's stream.
    """
    gc.collect()
    gc.freeze()
