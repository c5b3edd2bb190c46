"""The /kvedit routes: rights, bodies, the services behind them, recompiles.

Called by: the hooks of `http`, its gate, and `kvedit.client` inside an engine.
May touch: it meets the scheduler in commands only.
"""
