"""Which prompt a request is served with, and what becomes of its turn.

Called by: the intake hook, `wiring` when a request ends, commands about fields.
May touch: it reads the tree and writes the ledger.
"""
