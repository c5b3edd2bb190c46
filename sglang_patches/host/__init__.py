"""What the installed host must be, what its arguments may say, what it has resolved.

Called by: the plugin, the launcher and the scheduler, at start-up.
May touch: it reads the host; it changes nothing of it.
"""
