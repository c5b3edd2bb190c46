"""Composed prompts: spans, plans, the spelling of a tree key, what a pass costs, token classes.

Called by: `edit` and the scheduler.
May touch: it knows positions and numbers, neither slots nor locks.
"""
