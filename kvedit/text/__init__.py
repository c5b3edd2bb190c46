"""Texts in token ids: bytes of tokens, messages by control tokens, the form of a chat template.

Called by: rooms that read prompts: `edit`, the scheduler, the HTTP process.
May touch: it knows ids and tokenizers, neither fields nor skills.
"""
