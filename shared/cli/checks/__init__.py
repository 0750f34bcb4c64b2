"""What `kvpair doctor` looks at, one file a subject; a check returns findings, changes nothing.

A check takes what it looks at as arguments, so that it can be shown a machine that is not this one.
"""
