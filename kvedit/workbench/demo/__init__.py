"""`python -m kvedit.workbench.demo`: questions to a real server, full prefill against splices.

Called by: `scripts/demo`.
May touch: servers that it starts itself.
"""
