"""Declared fields: what may be declared, the book of them, the values everybody may know.

Called by: `edit`, the HTTP process and the scheduler.
May touch: it knows texts and names, nothing of a prompt.
"""
