"""Reports on their way out: from the scheduler to the HTTP request that asked.

Called by: the hooks of `http` and `http.gate`.
May touch: it changes answers; no decision is taken here.
"""
