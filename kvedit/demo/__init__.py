"""`python -m kvedit.demo`: questions to a real server, full prefill against splices."""
