"""The radix tree with composed paths, and how slots get into it.

Called by: hooks and commands.
May touch: it owns copies until they are launched, and the locks of their donors.
"""
