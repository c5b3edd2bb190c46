"""The hooks on the host's scheduler, one module a seam.

Called by: the plugin registers them.
May touch: each calls the rooms below; none is called by them.
"""
