"""What passes between the HTTP process and the scheduler, and what clients are shown: declared
once, encoded and checked by msgspec.

Called by: the services of `sglang_patches.http`, the commands of `sglang_patches.scheduler`.
May touch: it reads skills and fields to show them; it changes nothing.
"""
