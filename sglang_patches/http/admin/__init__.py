"""The /kvedit routes: on the server's port, in its /openapi.json, and without HTTP.

Called by: the hooks of `http`, and `kvedit.client` inside an engine.
May touch: requests and answers; the services do the work.
"""
