"""Builds the rooms of one scheduler process and ties them together.

Called by: the cache factory; hooks and commands ask it for the rooms of a tree.
May touch: every room below.
"""
