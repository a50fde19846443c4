"""The command line: one file a command, each a dataclass whose fields are the flags."""
