"""What the HTTP process may ask of a scheduler.

Called by: the internal-state hook.
May touch: it reads and changes registry, fields and pins, between two passes.
"""
