"""Tools around a server: its process, a timed request, models of our own making, the demo.

Called by: scripts, benches, tests, and the launcher, which checks the model folder.
May touch: processes and files.
"""
