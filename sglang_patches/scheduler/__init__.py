"""Everything that runs in a scheduler process.

Called by: the plugin registers its hooks; the HTTP process sends it commands.
May touch: it holds slots, locks and donors; it knows no HTTP.
"""
