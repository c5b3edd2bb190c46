"""What a server that was started for testing can be told besides.

Called by: the dispatch of commands and the wiring, where the configuration says so.
May touch: every room; it arms faults and reads slots.
"""
