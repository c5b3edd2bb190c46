"""Skills: their content, the registry and its transitions, how a prompt is searched, quotas.

Called by: the scheduler holds one registry; `splice` plans with it.
May touch: it knows ids and names, neither slots nor tree nodes.
"""
