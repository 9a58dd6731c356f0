"""The command line: one file a command, arguments in, a call, a table out."""
