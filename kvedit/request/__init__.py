"""What a client may ask of one request.

Called by: the HTTP process, the scheduler and the client library read it.
May touch: it stands on the ground modules only.
"""
