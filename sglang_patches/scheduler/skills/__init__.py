"""What becomes of a compiled skill: ready, pinned, given up.

Called by: `splice`, hooks and commands.
May touch: it moves states of the registry and locks the skill's own path.
"""
