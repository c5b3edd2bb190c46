"""Starting a server, and what is said before one starts.

Called by: the commands and `python -m sglang_patches.serve`.
May touch: flags, environment, the installed packages; no running server.
"""
