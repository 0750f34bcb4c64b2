"""The `kvpair` command, one file a sub-command.  Answers on stdout, everything else on stderr."""
