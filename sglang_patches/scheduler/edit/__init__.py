"""Which prompt a request is served with, and what becomes of its turn.

Called by: the intake and admission hooks; the tree, when a request ends.
May touch: it reads the tree and writes the ledger.
"""
