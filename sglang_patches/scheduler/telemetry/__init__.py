"""Metrics and events.

Called by: every room of the scheduler.
May touch: counters, events, the refusals in a request's report. An error in an export or an event
is counted and decides nothing.
"""
