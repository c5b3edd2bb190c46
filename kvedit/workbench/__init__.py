"""Tools around a server: its process, a timed request, models of our own making, the demo.

Called by: scripts, benches and tests.
May touch: it starts processes and writes files; nothing that serves imports it.
"""
