"""What the /kvedit routes and the gate ask for: rights, skills, fields, reports, recompiles.

Called by: `admin`, the gate and the hooks of `http`.
May touch: it meets the scheduler in commands only.
"""
