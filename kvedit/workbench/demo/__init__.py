"""`python -m kvedit.workbench.demo`: questions to a real server, full prefill against splices."""
