"""Metrics and events.

Called by: every room of the scheduler.
May touch: what goes wrong in here is counted and changes no decision.
"""
