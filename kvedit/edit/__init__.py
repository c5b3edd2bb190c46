"""Changed fields: where values stand, earlier turns and whose they are, what may be served.

Called by: the scheduler.
May touch: it decides on ids and turns; it allocates no slot and touches no tree.
"""
