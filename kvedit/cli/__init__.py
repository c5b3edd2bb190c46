"""The kvedit command, one module a subcommand.

Called by: the shell.
May touch: a server by `kvedit.Client`; a server's own process only to start it.
"""
