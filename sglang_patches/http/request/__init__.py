"""What a generate request must satisfy, and what only the HTTP process can tell of it.

Called by: `http.gate`, `http.answers` and the hooks of `http`.
May touch: it reads requests; it keeps nothing of them.
"""
